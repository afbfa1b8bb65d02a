"""OPT and Galactica: learned positions, ReLU. The 350m normalises behind its parts and projects its embedding."""

from typing import Any

from text_generation_inference.layers.norm import NormSpec
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

DEFAULTS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "no-bias": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
}
_EPS = 1e-5  # no field
_NAMES = TensorNames(
    decoder=("model.decoder", "decoder"),
    positions="embed_positions",
    attention_norm="self_attn_layer_norm",
    out="out_proj",
    feed_forward_norm="final_layer_norm",
    feed_forward="",
    gate_up=("fc1",),
    down="fc2",
    norm="final_layer_norm",
)


def build(config: Config, context: Context) -> Model:
    config = config.renamed(intermediate_size="ffn_dim").with_defaults(**DEFAULTS)
    sizes = read_sizes(config, config.integer("num_attention_heads"))
    bias, is_before = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    has_weights = config.flag("layer_norm_elementwise_affine", True)
    attention = AttentionSpec(
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        head_dim=sizes.head_dim,
        rope=NO_ROTATION,
        qkv_bias=bias,
        out_bias=bias,
    )
    feed_forward = DenseSpec(
        width=config.integer("intermediate_size"),
        activation=read_activation(config, "activation_function", is_gated=False),
        bias=bias,
        is_gated=False,
    )
    spec = DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=make_layers(attention, feed_forward, sizes.layers, Join.PRE if is_before else Join.NORMED_STREAM),
        norm=NormSpec(eps=_EPS, is_centred=True, bias=has_weights, has_weight=has_weights),
        max_positions=sizes.positions,
        tied=config.flag("tie_word_embeddings"),
        has_final_norm=is_before and not config.flag("_remove_final_layer_norm", False),
        learned_positions=2,
        embedding_size=config.integer("word_embed_proj_dim", sizes.hidden),
        names=_NAMES,
    )
    return CausalLM(spec, context)
