"""BLOOM: ALiBi, biases everywhere, and a norm right behind the embedding."""

from text_generation_inference.layers.alibi import alibi_slopes
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
    "vocab_size": 250880,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 320, "hidden_size": 96, "n_layer": 2, "n_head": 6}  # not a power of two
_NAMES = TensorNames(
    decoder=("transformer", ""),
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    layer="h.{}",
    attention="self_attention",
    qkv=("query_key_value",),
    out="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    norm="ln_f",
)


def build(config: Config, context: Context) -> Model:
    config = config.renamed(
        hidden_size="n_embed",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="seq_length",  # not a limit: positions have no table
    ).with_defaults(**DEFAULTS)
    config.refuse("apply_residual_connection_post_layernorm", False)
    sizes = read_sizes(config, config.integer("num_attention_heads"))
    attention = AttentionSpec(
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        head_dim=sizes.head_dim,
        rope=NO_ROTATION,
        qkv_bias=True,
        out_bias=True,
        qkv_layout=QkvLayout.GROUPED,
        slopes=alibi_slopes(sizes.heads),
    )
    feed_forward = DenseSpec(width=4 * sizes.hidden, activation="gelu_tanh", bias=True, is_gated=False)
    spec = DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=make_layers(attention, feed_forward, sizes.layers, Join.PRE),
        norm=NormSpec(eps=config.positive("layer_norm_epsilon"), is_centred=True, bias=True),
        max_positions=sizes.positions,
        tied=config.flag("tie_word_embeddings"),
        names=_NAMES,
    )
    return CausalLM(spec, context)
