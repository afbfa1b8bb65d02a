"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional windows on the upper layers."""

from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_llama_like

TINY = {**LLAMA_TINY, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


def build(config: Config, context: Context) -> Model:
    return CausalLM(read_llama_like(config, qkv_bias=True, windows=read_windows(config)), context)


def read_windows(config: Config) -> list[int | None] | None:
    """By layer; None: no layer has one."""
    if not config.flag("use_sliding_window", False):
        return None
    window, first = config.integer("sliding_window"), int(config.number("max_window_layers", 28))
    return [window if layer >= first else None for layer in range(config.integer("num_hidden_layers"))]
