"""Phi-1, 1.5 and 2: attention beside the feed-forward behind one norm, biases everywhere, on the head too."""

from dataclasses import replace

from text_generation_inference.layers.head_norm import HeadNormSpec
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import Join, TensorNames, read_llama_like, with_layers

DEFAULTS = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2}
VARIANTS = {"qk-norm": {"qk_layernorm": True, "num_key_value_heads": 4}, "tied": {"tie_word_embeddings": True}}
_NAMES = TensorNames(out="dense", gate_up=("fc1",), down="fc2", norm="final_layernorm")


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    norm = NormSpec(eps=config.positive("layer_norm_eps"), is_centred=True, bias=True)
    qk_norm = HeadNormSpec(norm=norm, names=("q_layernorm", "k_layernorm"))
    spec = read_llama_like(
        config,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        is_gated=False,
        norm=norm,
        qk_norm=qk_norm if config.flag("qk_layernorm", False) else None,
        share=0.5,
    )
    spec = with_layers(spec, join=Join.PARALLEL)
    return CausalLM(replace(spec, head_bias=True, names=_NAMES), context)
