"""Granite: Llama with factors on the embedding, on what joins the stream, on scores and on logits."""

from dataclasses import replace

from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import read_llama_like, with_attention, with_layers

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
TINY = {
    **LLAMA_TINY,
    "num_hidden_layers": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    spec = with_attention(spec, own_scale=config.positive("attention_multiplier"))
    spec = with_layers(spec, residual_factor=config.positive("residual_multiplier"))
    return CausalLM(
        replace(
            spec,
            embedding_factor=config.positive("embedding_multiplier"),
            logits_factor=1 / config.positive("logits_scaling"),
        ),
        context,
    )
