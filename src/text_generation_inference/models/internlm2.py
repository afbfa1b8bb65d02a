"""InternLM2: Llama with names of its own, and queries, keys and values by group in one tensor."""

from dataclasses import replace

from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import TensorNames, read_llama_like, with_attention

DEFAULTS = {
    "vocab_size": 103168,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bias": True,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2, "bias": False}
NAMES = TensorNames(
    embedding="tok_embeddings",
    attention_norm="attention_norm",
    attention="attention",
    qkv=("wqkv",),
    out="wo",
    feed_forward_norm="ffn_norm",
    feed_forward="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
    head=("output",),
)


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    bias = config.flag("bias")
    spec = with_attention(read_llama_like(config, qkv_bias=bias, out_bias=bias), qkv_layout=QkvLayout.GROUPED)
    return CausalLM(replace(spec, names=NAMES), context)
