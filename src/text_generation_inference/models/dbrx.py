"""DBRX: centred norms without biases, clipped queries, keys and values, and the matrices of experts in one tensor."""

from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.qkv import QkvLayout
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.rope_config import read_rope
from text_generation_inference.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertLayout,
    ExpertNames,
    ExpertsSpec,
    LayerSpec,
    TensorNames,
    check_experts,
    read_activation,
    read_sizes,
)

_ROPE = {"rope_type": "default", "rope_theta": 500.0}
TINY = {
    "vocab_size": 320,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 512,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 500.0},
    "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64, "moe_num_experts": 6, "moe_top_k": 3},
    "rope_parameters": _ROPE,  # what `transformers` reads in place of `attn_config.rope_theta`
}
_NAMES = TensorNames(
    decoder=("transformer",),
    embedding="wte",
    layer="blocks.{}",
    attention_norm="norm_attn_norm.norm_1",
    attention="norm_attn_norm.attn",
    qkv=("Wqkv",),
    out="out_proj",
    feed_forward_norm="norm_attn_norm.norm_2",
    feed_forward="ffn",
    norm="norm_f",
)
_EXPERTS = ExpertNames(
    router="router.layer",
    matrices=("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"),
    layout=ExpertLayout.STACKED,
)
_EACH_EXPERT = ExpertNames(  # of GGUF files
    router="router.layer", matrices=("experts.{}.w1", "experts.{}.v1", "experts.{}.w2")
)


def build(config: Config, context: Context) -> Model:
    config = config.renamed(
        hidden_size="d_model",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        max_position_embeddings="max_seq_len",
    ).with_defaults(
        hidden_size=2048,
        num_attention_heads=16,
        num_hidden_layers=24,
        max_position_embeddings=2048,
        vocab_size=32000,
    )
    attention, feed_forward = config.inner("attn_config"), config.inner("ffn_config")
    sizes = read_sizes(config, kv_heads=attention.integer("kv_n_heads", 1))
    num_experts, top_k = check_experts(
        feed_forward.with_defaults(moe_num_experts=4, moe_top_k=1), "moe_num_experts", "moe_top_k"
    )
    norm = feed_forward.with_defaults(moe_normalize_expert_weights=1.0).optional_positive(
        "moe_normalize_expert_weights"
    )
    experts = ExpertsSpec(
        num_experts=num_experts,
        width=feed_forward.integer("ffn_hidden_size", 3584),
        routing=SoftmaxRouting(top_k, p_norm=norm),
        activation=read_activation(feed_forward.inner("ffn_act_fn"), "name", "silu"),
        names=_EXPERTS,
        other_names=(_EACH_EXPERT,),
    )
    theta = attention.optional_positive("rope_theta")
    rope = config if theta is None else Config({"rope_theta": theta}, config.source)
    layer = AttentionSpec(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rope=read_rope(rope, sizes.head_dim, sizes.positions, theta=10000.0),
        qkv_layout=QkvLayout.STACKED,
        clip=attention.optional_positive("clip_qkv"),
    )
    spec = DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=sizes.hidden,
        layers=(LayerSpec(attention=layer, feed_forward=experts),) * sizes.layers,
        norm=NormSpec(eps=1e-5, is_centred=True),
        max_positions=sizes.positions,
        tied=config.flag("tie_word_embeddings", False),
        names=_NAMES,
    )
    return CausalLM(spec, context)
