"""Gemma 3, text: Gemma 2 with norms on queries and keys in place of caps; windowed layers rotate otherwise.

`vision/gemma3` adds pictures.
"""

from dataclasses import replace
from typing import Any

from text_generation_inference.layers.head_norm import HeadNormSpec
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.rotary import RopeSpec
from text_generation_inference.models.config import Config, windows_by_layer
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.gemma import as_gemma
from text_generation_inference.models.gemma2 import NAMES as GEMMA2_NAMES
from text_generation_inference.models.gemma2 import TINY as GEMMA2_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.rope_config import read_rope
from text_generation_inference.models.spec import DecoderSpec, Join, read_llama_like, with_attention, with_layers

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
TINY = {
    **GEMMA2_TINY,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": 5.0,  # a field without effect
    "final_logit_softcapping": None,
}
SCALED_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
VARIANTS: dict[str, dict[str, Any]] = {"linear-rope": {"rope_parameters": SCALED_ROPE}}
_NAMES = replace(
    GEMMA2_NAMES,
    decoder=("model", "language_model.model", "model.language_model"),
    head=("lm_head", "language_model.lm_head"),
)


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    num_layers, every = config.integer("num_hidden_layers"), config.integer("sliding_window_pattern", 6)
    has_window = [bool((layer + 1) % every) for layer in range(num_layers)]
    windows = windows_by_layer(config, num_layers, has_window, config.optional_integer("sliding_window"))
    bias = config.flag("attention_bias", False)
    plain = Config({**config.fields, "rope_scaling": None, "rope_parameters": None}, config.source)
    spec = read_llama_like(plain, qkv_bias=bias, out_bias=bias, windows=windows, activation="hidden_activation")
    norm = NormSpec(eps=config.positive("rms_norm_eps", 1e-6), plus=1.0)
    spec = with_attention(
        spec,
        own_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        qk_norm=HeadNormSpec(norm=norm),
    )
    spec = with_layers(_rotate(config, as_gemma(config, spec)), join=Join.SANDWICH)
    softcap = config.optional_positive("final_logit_softcapping")
    return CausalLM(replace(spec, logits_softcap=softcap, exceeds_float16=True, names=_NAMES), context)


def _rotate(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """Each layer with the table of its type."""
    dim, positions = spec.layers[0].attention.head_dim, spec.max_positions
    full = read_rope(config, dim, positions, theta=1e6, layer_type="full_attention")
    settings = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(settings, dict) and "sliding_attention" in settings:
        local = read_rope(config, dim, positions, layer_type="sliding_attention")
    else:  # never scaled
        local = RopeSpec(
            theta=config.positive("rope_local_base_freq", 1e4),
            rotary_dim=full.rotary_dim,
            original_max_positions=positions,
        )
    layers = (
        replace(layer, attention=replace(layer.attention, rope=full if layer.attention.window is None else local))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))
