"""Qwen3: Llama whose queries and keys are normalised head by head, and optional windows on the upper layers."""

from text_generation_inference.layers.head_norm import HeadNormSpec
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.qwen2 import read_windows
from text_generation_inference.models.spec import read_llama_like

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden size by heads
    "max_position_embeddings": 512,
}
VARIANTS = {
    "windows": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "attention_bias": True},
    "tied": {"tie_word_embeddings": True},
}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    bias = config.flag("attention_bias", False)
    qk_norm = HeadNormSpec(norm=NormSpec(eps=config.positive("rms_norm_eps", 1e-6)))
    return CausalLM(
        read_llama_like(config, qkv_bias=bias, out_bias=bias, windows=read_windows(config), qk_norm=qk_norm), context
    )
