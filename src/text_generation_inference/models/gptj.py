"""GPT-J: attention beside the feed-forward behind one norm, neighbours rotated together, a bias on the head."""

from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.layers.rotary import RopeSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.gpt2 import FIELDS
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
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
TINY = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8}
VARIANTS = {"tied": {"tie_word_embeddings": True}}
NAMES = TensorNames(
    decoder=("transformer", ""),
    embedding="wte",
    layer="h.{}",
    attention_norm="ln_1",
    attention="attn",
    out="out_proj",
    gate_up=("fc_in",),
    down="fc_out",
    norm="ln_f",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)


def build(config: Config, context: Context) -> Model:
    return CausalLM(read_gptj_like(config, NAMES), context)


def read_gptj_like(config: Config, names: TensorNames, layout: QkvLayout = QkvLayout.SEPARATE) -> DecoderSpec:
    """What GPT-J and CodeGen share."""
    config = config.renamed(**FIELDS).with_defaults(**DEFAULTS)
    sizes = read_sizes(config, config.integer("num_attention_heads"))
    rotary_dim = config.integer("rotary_dim", sizes.head_dim)
    if rotary_dim % 2 or rotary_dim > sizes.head_dim:
        raise config.wrong("rotary_dim", f"is {rotary_dim}, of {sizes.head_dim} dimensions of a head")
    attention = AttentionSpec(
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        head_dim=sizes.head_dim,
        rope=RopeSpec(rotary_dim=rotary_dim),
        interleaved=True,
        qkv_layout=layout,
    )
    feed_forward = DenseSpec(
        width=config.integer("intermediate_size", 4 * sizes.hidden),
        activation=read_activation(config, "activation_function", is_gated=False),
        bias=True,
        is_gated=False,
    )
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=make_layers(attention, feed_forward, sizes.layers, Join.PARALLEL),
        norm=NormSpec(eps=config.positive("layer_norm_epsilon"), is_centred=True, bias=True),
        max_positions=sizes.positions,
        tied=config.flag("tie_word_embeddings"),
        head_bias=True,
        names=names,
    )
