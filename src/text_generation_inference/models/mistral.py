"""Mistral: Llama with a sliding window on every layer."""

from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_llama_like

TINY = {**LLAMA_TINY, "sliding_window": 24, "head_dim": 16}


def build(config: Config, context: Context) -> Model:
    windows = [config.optional_integer("sliding_window")] * config.integer("num_hidden_layers")
    return CausalLM(read_llama_like(config, windows=windows), context)
