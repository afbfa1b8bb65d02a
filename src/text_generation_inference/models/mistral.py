"""Mistral: Llama with a sliding window on every layer."""

from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.spec import Config, DecoderSpec, read_llama_like

TINY = {**LLAMA_TINY, "sliding_window": 24, "head_dim": 16}


def read_spec(config: Config) -> DecoderSpec:
    window = config.optional_integer("sliding_window")
    return read_llama_like(config, windows=(window,) * config.integer("num_hidden_layers"))
