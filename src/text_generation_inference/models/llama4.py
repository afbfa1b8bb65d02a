"""Llama 4, text: chunked attention with rotation, then a layer without positions over all; experts beside a shared one.

Inside the wrapper with images (`Llama4ForConditionalGeneration`) the text model alone is served.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from text_generation_inference.files import shorten
from text_generation_inference.kernels.routing import InputRouting
from text_generation_inference.layers.attention import TemperatureSpec
from text_generation_inference.layers.head_norm import HeadNormSpec
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.rotary import NO_ROTATION
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertLayout,
    ExpertNames,
    ExpertsSpec,
    TensorNames,
    check_experts,
    read_activation,
    read_llama_like,
    with_experts,
)

DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
}
TINY: dict[str, Any] = {
    **LLAMA_TINY,
    "intermediate_size": 32,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 6,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "attn_scale": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
TINIES: dict[str, dict[str, Any]] = {"Llama4ForConditionalGeneration": {"text_config": TINY, "vision_config": _VISION}}
_SCOUT_ROPE = {  # nothing lies between what is slowed and what is kept
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "no-qk-norm": {"use_qk_norm": False, "interleave_moe_layer_step": 1},
    "scout-rope": {"rope_parameters": _SCOUT_ROPE, "attn_temperature_tuning": False},
}
_NAMES = TensorNames(
    decoder=("model", "language_model.model", "model.language_model"),
    head=("lm_head", "language_model.lm_head"),
    feed_forward="feed_forward",
    ignored=("*.rotary_emb.inv_freq", "*vision_model.*", "*multi_modal_projector.*"),
)
_EXPERTS = ExpertNames(
    router="router",
    matrices=("experts.gate_up_proj", "experts.down_proj"),
    layout=ExpertLayout.FUSED_TRANSPOSED,
)


def build(config: Config, context: Context) -> Model:
    if config.get("text_config") is not None:
        config = config.inner("text_config").with_defaults(
            tie_word_embeddings=config.flag("tie_word_embeddings", False)
        )
    config = config.with_defaults(**DEFAULTS)
    bias, activation = config.flag("attention_bias", False), read_activation(config, default="silu")
    num_experts, top_k = check_experts(config, "num_local_experts", "num_experts_per_tok")
    width, dense_width = config.integer("intermediate_size"), config.integer("intermediate_size_mlp")
    experts = ExpertsSpec(
        num_experts=num_experts,
        width=width,
        routing=InputRouting(top_k),
        activation=activation,
        shared=DenseSpec(width=width, activation=activation),
        scale_inputs=True,
        names=_EXPERTS,
        other_names=(ExpertNames(router="router"),),  # of quantised versions
    )
    dense = Config({**config.fields, "intermediate_size": dense_width}, config.source)
    spec = read_llama_like(dense, qkv_bias=bias, out_bias=bias, theta=500000.0)
    attentions = _read_attention(config, spec.layers[0].attention, len(spec.layers))
    layers = (replace(layer, attention=attention) for layer, attention in zip(spec.layers, attentions, strict=True))
    spec = replace(spec, layers=tuple(layers), names=_NAMES)
    return CausalLM(with_experts(spec, experts, _read_sparse_layers(config)), context)


def _read_attention(config: Config, every: AttentionSpec, num_layers: int) -> list[AttentionSpec]:
    """Of each layer, from what all have in common."""
    rotated = _read_rotated(config, num_layers)
    types = config.words("layer_types", num_layers, ("full_attention", "chunked_attention"))
    chunked = [each == "chunked_attention" for each in types] if types is not None else rotated
    chunk = config.optional_integer("attention_chunk_size")
    if chunk is None and any(chunked):
        raise config.wrong("attention_chunk_size", "is null, but layers attend by chunk")
    temperature = None
    if _is_tuned(config):
        temperature = TemperatureSpec(config.positive("attn_scale", 0.1), config.integer("floor_scale", 8192))
    rope = every.rope
    qk_norm = None
    if config.flag("use_qk_norm", True):
        # A norm without weights after a rotation is one before it; whatever factor the rotation has is normed away.
        qk_norm = HeadNormSpec(norm=NormSpec(eps=config.positive("rms_norm_eps"), has_weight=False))
        rope = replace(rope, attention_factor=1.0)
    with_rope = replace(every, rope=rope, interleaved=True, qk_norm=qk_norm)
    without = replace(every, rope=NO_ROTATION, temperature=temperature)
    return [
        replace(with_rope if is_rotated else without, attention_chunk=chunk if is_chunked else None)
        for is_rotated, is_chunked in zip(rotated, chunked, strict=True)
    ]


def _read_rotated(config: Config, num_layers: int) -> list[bool]:
    """By layer; the field says which ones rotate, whatever its name says."""
    found = config.get("no_rope_layers")
    if not found:
        every = config.integer("no_rope_layer_interval", 4)
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if not isinstance(found, Sequence) or len(found) != num_layers or any(each not in (0, 1) for each in found):
        raise config.wrong("no_rope_layers", f"must be a list of {num_layers} times 0 or 1, it is {shorten(found)}")
    return [bool(each) for each in found]


def _read_sparse_layers(config: Config) -> Sequence[int]:
    """Numbers of the layers with experts."""
    found = config.get("moe_layers")
    if found is None:
        step = config.integer("interleave_moe_layer_step", 1)
        return range(step - 1, config.integer("num_hidden_layers"), step)
    if not isinstance(found, list) or not all(isinstance(number, int) for number in found):
        raise config.wrong("moe_layers", f"must be a list of numbers of layers, it is {shorten(found)}")
    return found


def _is_tuned(config: Config) -> bool:
    """Old files have a number here, of which only whether it is 0 counts."""
    found = config.get("attn_temperature_tuning")
    if not isinstance(found, int):
        raise config.wrong("attn_temperature_tuning", f"must be true or false, it is {shorten(found)}")
    return bool(found)
