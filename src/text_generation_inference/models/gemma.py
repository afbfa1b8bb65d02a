"""Gemma: Llama whose norms are stored as w for 1 + w, and whose embedding is scaled."""

from dataclasses import replace

from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import DecoderSpec, read_llama_like

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2, "head_dim": 24, "hidden_act": "gelu_pytorch_tanh"}
VARIANTS = {"one-kv-head": {"num_key_value_heads": 1}}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS, hidden_act="gelu_pytorch_tanh")
    if config.get("hidden_act") == "gelu":  # the tanh form is meant
        config = Config({**config.fields, "hidden_act": "gelu_pytorch_tanh"}, config.source)
    bias = config.flag("attention_bias", False)
    return CausalLM(as_gemma(config, read_llama_like(config, qkv_bias=bias, out_bias=bias)), context)


def as_gemma(config: Config, spec: DecoderSpec) -> DecoderSpec:
    """What all Gemmas have in common."""
    config.refuse("use_bidirectional_attention", False)
    norm = NormSpec(eps=config.positive("rms_norm_eps", 1e-6), plus=1.0)
    return replace(spec, norm=norm, embedding_factor=spec.hidden_size**0.5)
