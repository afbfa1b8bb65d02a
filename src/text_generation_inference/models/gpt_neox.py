"""GPT-NeoX, Pythia, Dolly and others: attention beside the feed-forward, each with a norm; a part of heads rotates."""

from dataclasses import replace

from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import Join, TensorNames, read_llama_like, with_attention, with_layers

DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "attention_bias": True,
}
TINY = {**LLAMA_TINY, "num_hidden_layers": 2, "num_key_value_heads": 4}
VARIANTS = {"one-after-the-other": {"use_parallel_residual": False, "hidden_act": "gelu_fast"}}
_NAMES = TensorNames(
    decoder=("gpt_neox",),
    embedding="embed_in",
    attention="attention",
    qkv=("query_key_value",),
    out="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    norm="final_layer_norm",
    head=("embed_out", "lm_head"),
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
)


def build(config: Config, context: Context) -> Model:
    config = config.renamed(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base").with_defaults(**DEFAULTS)
    config = Config({**config.fields, "num_key_value_heads": None}, config.source)  # every head has keys of its own
    bias = config.flag("attention_bias")
    norm = NormSpec(eps=config.positive("layer_norm_eps"), is_centred=True, bias=True)
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, mlp_bias=True, is_gated=False, norm=norm, share=0.25)
    join = Join.PARALLEL_TWO if config.flag("use_parallel_residual") else Join.PRE
    spec = with_layers(with_attention(spec, qkv_layout=QkvLayout.GROUPED), join=join)
    return CausalLM(replace(spec, names=_NAMES), context)
