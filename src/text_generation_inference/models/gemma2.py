"""Gemma 2: Gemma with norms before and after each part, capped scores and logits, and windows on every second layer."""

from dataclasses import replace

from text_generation_inference.models.config import Config, windows_by_layer
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.gemma import TINY as GEMMA_TINY
from text_generation_inference.models.gemma import as_gemma
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import Join, TensorNames, read_llama_like, with_attention, with_layers

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
TINY = {
    **GEMMA_TINY,
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}
NAMES = TensorNames(feed_forward_norm="pre_feedforward_layernorm")


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    num_layers = config.integer("num_hidden_layers")
    has_window = [layer % 2 == 0 for layer in range(num_layers)]
    windows = windows_by_layer(config, num_layers, has_window, config.optional_integer("sliding_window"))
    bias = config.flag("attention_bias", False)
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, windows=windows, activation="hidden_activation")
    spec = with_attention(
        spec,
        own_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        softcap=config.optional_positive("attn_logit_softcapping"),
    )
    spec = with_layers(as_gemma(config, spec), join=Join.SANDWICH)
    softcap = config.optional_positive("final_logit_softcapping")
    return CausalLM(replace(spec, logits_softcap=softcap, exceeds_float16=True, names=NAMES), context)
