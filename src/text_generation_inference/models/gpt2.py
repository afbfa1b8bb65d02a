"""GPT-2: learned positions, norms with a mean, and matrices that are stored the other way round."""

from dataclasses import replace

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
    read_activation,
    read_sizes,
)

FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 321, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}  # ranks do not divide it
VARIANTS = {"scales": {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}}
NAMES = TensorNames(
    decoder=("transformer", ""),
    embedding="wte",
    positions="wpe",
    layer="h.{}",
    attention_norm="ln_1",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    feed_forward_norm="ln_2",
    gate_up=("c_fc",),
    down="c_proj",
    norm="ln_f",
    transposed=True,
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


def build(config: Config, context: Context) -> Model:
    config.refuse("add_cross_attention", False)
    return CausalLM(read_gpt2_like(config, NAMES, QkvLayout.STACKED, None), context)


def read_gpt2_like(config: Config, names: TensorNames, layout: QkvLayout, kv_heads: int | None) -> DecoderSpec:
    """What GPT-2 and StarCoder share."""
    config = config.renamed(**FIELDS).with_defaults(**DEFAULTS)
    sizes = read_sizes(config, kv_heads or config.integer("num_attention_heads"))
    scale = sizes.head_dim**-0.5 if config.flag("scale_attn_weights") else 1.0
    attention = AttentionSpec(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rope=NO_ROTATION,
        qkv_bias=True,
        out_bias=True,
        own_scale=scale,
        qkv_layout=layout,
    )
    feed_forward = DenseSpec(
        width=config.integer("intermediate_size", 4 * sizes.hidden),
        activation=read_activation(config, "activation_function", is_gated=False),
        bias=True,
        is_gated=False,
    )
    layers = make_layers(attention, feed_forward, sizes.layers, Join.PRE)
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        layers = tuple(
            replace(layer, attention=replace(attention, own_scale=scale / number))
            for number, layer in enumerate(layers, 1)
        )
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=layers,
        norm=NormSpec(eps=config.positive("layer_norm_epsilon"), is_centred=True, bias=True),
        max_positions=sizes.positions,
        tied=config.flag("tie_word_embeddings"),
        learned_positions=0,
        names=names,
    )
