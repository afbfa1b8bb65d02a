"""Falcon: attention beside the feed-forward, keys shared by many queries; the first ones (RW) with ALiBi.

Falcon 3 says `LlamaForCausalLM`.
"""

from typing import Any

from text_generation_inference.layers.alibi import alibi_slopes
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.layers.rotary import NO_ROTATION
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.rope_config import read_rope
from text_generation_inference.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    Join,
    TensorNames,
    make_layers,
    read_activation,
    read_sizes,
)

DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "activation": "gelu",
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "tie_word_embeddings": True,
}
_OLD_DEFAULTS = {**DEFAULTS, "multi_query": False, "parallel_attn": False}  # of `RWForCausalLM`, before `transformers`
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "40B": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False},
    "11B": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
        "ffn_hidden_size": 96,
    },
    "RW": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
}


def build(config: Config, context: Context) -> Model:
    config = config.renamed(num_attention_heads="n_head", num_hidden_layers="n_layer", num_kv_heads="n_head_kv")
    if "RWForCausalLM" in config.fields["architectures"]:
        is_large = config.get("model_type") == "RefinedWeb"  # 40B: its file has no flag for that
        config = config.with_defaults(**{**_OLD_DEFAULTS, "new_decoder_architecture": is_large})
    config = config.with_defaults(**DEFAULTS)
    is_new, is_parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_kv_heads", heads) if is_new else 1 if config.flag("multi_query") else heads
    sizes = read_sizes(config, kv_heads)
    if is_new and not is_parallel:
        raise config.wrong("parallel_attn", "is false, which does not go with `new_decoder_architecture`")
    norms = config.integer("num_ln_in_parallel_attn", 2) if is_new else 1
    bias, alibi = config.flag("bias"), config.flag("alibi")
    # It is added before scores are scaled.
    slopes = tuple(slope * sizes.head_dim**-0.5 for slope in alibi_slopes(heads)) if alibi else ()
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes.head_dim,
        rope=NO_ROTATION if alibi else read_rope(config, sizes.head_dim, sizes.positions),
        qkv_bias=bias,
        out_bias=bias,
        qkv_layout=QkvLayout.GROUPED,
        slopes=slopes,
    )
    feed_forward = DenseSpec(
        width=config.integer("ffn_hidden_size", 4 * sizes.hidden),
        activation=read_activation(config, "activation", is_gated=False),
        bias=bias,
        is_gated=False,
    )
    join = (Join.PARALLEL_TWO if norms == 2 else Join.PARALLEL) if is_parallel else Join.PRE
    spec = DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=make_layers(attention, feed_forward, sizes.layers, join),
        norm=NormSpec(eps=config.positive("layer_norm_epsilon"), is_centred=True, bias=True),
        max_positions=sizes.positions,
        tied=config.flag("tie_word_embeddings"),
        ties_without_head=True,
        names=TensorNames(
            decoder=("transformer", ""),
            embedding="word_embeddings",
            layer="h.{}",
            attention="self_attention",
            attention_norm="ln_attn" if join is Join.PARALLEL_TWO else "input_layernorm",
            feed_forward_norm="ln_mlp" if join is Join.PARALLEL_TWO else "post_attention_layernorm",
            qkv=("query_key_value",),
            out="dense",
            gate_up=("dense_h_to_4h",),
            down="dense_4h_to_h",
            norm="ln_f",
        ),
    )
    return CausalLM(spec, context)
