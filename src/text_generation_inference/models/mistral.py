"""Mistral: Llama with a sliding window on every layer."""

from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_llama_like

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
TINY = {**LLAMA_TINY, "sliding_window": 24, "head_dim": 16}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS, sliding_window=4096)
    windows = [config.optional_integer("sliding_window")] * config.integer("num_hidden_layers")
    return CausalLM(read_llama_like(config, windows=windows), context)
