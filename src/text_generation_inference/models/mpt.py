"""MPT: ALiBi or learned positions, no biases, and settings of attention in an object of their own."""

from typing import Any

from text_generation_inference.layers.alibi import alibi_slopes
from text_generation_inference.layers.head_norm import HeadNormSpec, NormOver
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.layers.rotary import NO_ROTATION
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    Join,
    TensorNames,
    make_layers,
    read_sizes,
)

DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 320, "d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 512}
VARIANTS: dict[str, dict[str, Any]] = {"clip": {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4}}}


def build(config: Config, context: Context) -> Model:
    config = config.renamed(
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    ).with_defaults(**DEFAULTS)
    attn = config.inner("attn_config")
    config.refuse("norm_type", "low_precision_layernorm", "layernorm")
    attn.refuse("prefix_lm", False)
    attn.refuse("sliding_window_size", -1)
    attn.refuse("rope", False)
    attn.refuse("attn_type", "multihead_attention", "multiquery_attention", "grouped_query_attention")
    heads = config.integer("num_attention_heads")
    is_multi_query = attn.get("attn_type") == "multiquery_attention"
    sizes = read_sizes(config, attn.integer("kv_n_heads", 1 if is_multi_query else heads))
    bias, alibi = not config.flag("no_bias", True), attn.flag("alibi", True)
    norm = NormSpec(eps=config.positive("layer_norm_epsilon"), is_centred=True, bias=bias)
    qk_norm = HeadNormSpec(norm=norm, over=NormOver.ALL_HEADS, names=("q_ln", "k_ln"))
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rope=NO_ROTATION,
        qkv_bias=bias,
        out_bias=bias,
        own_scale=attn.optional_positive("softmax_scale"),
        qkv_layout=QkvLayout.STACKED,
        qk_norm=qk_norm if attn.flag("qk_ln", False) else None,
        clip=attn.optional_positive("clip_qkv"),
        slopes=alibi_slopes(heads, min(attn.positive("alibi_bias_max", 8.0), 1e4)) if alibi else (),
    )
    width = int(min(config.positive("expansion_ratio", 4), 2**10) * sizes.hidden)
    feed_forward = DenseSpec(width=max(width, 1), activation="gelu", bias=bias, is_gated=False)
    spec = DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=make_layers(attention, feed_forward, sizes.layers, Join.PRE),
        norm=norm,
        max_positions=sizes.positions,
        tied=config.flag("tie_word_embeddings"),
        learned_positions=None if alibi else 0,
        logits_factor=_logits_factor(config, sizes.hidden),
        names=TensorNames(
            decoder=("transformer",),
            embedding="wte",
            positions="wpe",
            layer="blocks.{}",
            attention_norm="norm_1",
            attention="attn",
            qkv=("Wqkv",),
            out="out_proj",
            feed_forward_norm="norm_2",
            feed_forward="ffn",
            gate_up=("up_proj",),
            down="down_proj",
            norm="norm_f",
        ),
    )
    return CausalLM(spec, context)


def _logits_factor(config: Config, hidden_size: int) -> float:
    if config.get("logit_scale") == "inv_sqrt_d_model":
        return hidden_size**-0.5
    return config.optional_positive("logit_scale") or 1.0
