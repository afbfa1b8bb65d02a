"""Qwen2-MoE: Qwen2 with experts, and one that every token passes through a gate of its own."""

from collections.abc import Collection

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import shorten
from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.qwen2 import windows_of
from text_generation_inference.models.spec import (
    DenseSpec,
    ExpertsSpec,
    check_experts,
    read_activation,
    read_llama_like,
    with_experts,
)

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
TINY = {
    **LLAMA_TINY,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [1],
    "norm_topk_prob": False,
}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    activation = read_activation(config, default="silu")
    num_experts, top_k = check_experts(config, "num_experts", "num_experts_per_tok")
    experts = ExpertsSpec(
        num_experts=num_experts,
        width=config.integer("moe_intermediate_size", 1408),
        routing=SoftmaxRouting(top_k, p_norm=1 if config.flag("norm_topk_prob", False) else None),
        activation=activation,
        shared=DenseSpec(width=config.integer("shared_expert_intermediate_size", 5632), activation=activation),
        shared_gate=True,
    )
    spec = read_llama_like(config, qkv_bias=config.flag("qkv_bias", True), windows=_read_windows(config))
    return CausalLM(with_experts(spec, experts, sparse_layers(config)), context)


def _read_windows(config: Config) -> list[int | None] | None:
    """On every second layer, up to `max_window_layers`."""
    if not config.flag("use_sliding_window", False):
        return None
    last = config.number("max_window_layers", 28)
    return windows_of(config, [layer % 2 == 0 and layer < last for layer in range(config.integer("num_hidden_layers"))])


def sparse_layers(config: Config) -> Collection[int]:
    """Numbers of the layers with experts."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(number, int) for number in dense):
        raise ModelFormatError(
            f"{config.source}: `mlp_only_layers` must be a list of numbers of layers, it is {shorten(dense)}"
        )
    step = config.integer("decoder_sparse_step", 1)
    numbers = range(config.integer("num_hidden_layers"))
    return [number for number in numbers if (number + 1) % step == 0 and number not in dense]
