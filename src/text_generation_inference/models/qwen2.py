"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional windows on the upper layers."""

from text_generation_inference.models.config import Config, windows_by_layer
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_llama_like

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
TINY = {**LLAMA_TINY, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    return CausalLM(read_llama_like(config, qkv_bias=True, windows=read_windows(config)), context)


def read_windows(config: Config) -> list[int | None] | None:
    """By layer; None: no layer has one."""
    if not config.flag("use_sliding_window", False):
        return None
    first = config.number("max_window_layers", 28)
    return windows_of(config, [layer >= first for layer in range(config.integer("num_hidden_layers"))])


def windows_of(config: Config, default: list[bool]) -> list[int | None]:
    """`default`: which layers have one where `layer_types` is missing. A window that is null is none."""
    window = config.with_defaults(sliding_window=4096).optional_integer("sliding_window")
    return windows_by_layer(config, len(default), default, window)
