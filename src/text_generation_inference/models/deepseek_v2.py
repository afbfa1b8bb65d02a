"""DeepSeek V2 (V2-Lite, Coder-V2): attention over latents, experts with shared ones, the first layers dense."""

import math

from text_generation_inference.kernels.routing import Routing, SoftmaxRouting
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.rotary import RopeSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.rope_config import read_rope
from text_generation_inference.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    ExpertNames,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    check_experts,
    read_activation,
)

DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
VARIANTS = {
    "query-latents": {
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "mlp_bias": True,
        "rope_parameters": YARN,
    },
}
_NAMES = ExpertNames(shared="shared_experts")


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    config.refuse("norm_topk_prob", False)
    config.refuse("scoring_func", "softmax")
    top_k = check_experts(config, "n_routed_experts", "num_experts_per_tok")[1]
    is_grouped = config.choice("topk_method", ("greedy", "group_limited_greedy")) != "greedy"
    groups, top_groups = read_groups(config) if is_grouped else (1, 1)
    factor = config.positive("routed_scaling_factor", 1.0)
    routing = SoftmaxRouting(top_k, factor=factor, num_groups=groups, top_groups=top_groups)
    return CausalLM(read_latent_decoder(config, routing), context)


def read_groups(config: Config) -> tuple[int, int]:
    """In how many groups experts are, and of how many of them a token's may be."""
    count, groups = config.integer("n_routed_experts"), config.integer("n_group", 1)
    if count % groups:
        raise config.wrong("n_group", f"is {groups}, but {count} experts are no such number of groups")
    top_groups, top_k = config.integer("topk_group", 1), config.integer("num_experts_per_tok")
    if top_groups > groups:
        raise config.wrong("topk_group", f"is {top_groups}, but `n_group` only {groups}")
    if top_k > count // groups * top_groups:
        raise config.wrong("num_experts_per_tok", f"is {top_k}, more than `topk_group` ({top_groups}) groups have")
    return groups, top_groups


def read_latent_decoder(
    config: Config, routing: Routing, *, interleaved: bool = True, correction: bool = False
) -> DecoderSpec:
    """What both generations have in common."""
    config.refuse("attention_bias", False)
    heads, positions = config.integer("num_attention_heads"), config.integer("max_position_embeddings", 2048)
    config.refuse("num_key_value_heads", heads)
    plain_dim, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise config.wrong("qk_rope_head_dim", f"is {rope_dim}, which is not even")
    rope = read_rope(config, rope_dim, positions)
    if rope.rotary_dim != rope_dim:
        raise config.wrong("partial_rotary_factor", "must be 1: `qk_rope_head_dim` says what is rotated")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=plain_dim + rope_dim,
        rope=rope,
        own_scale=(plain_dim + rope_dim) ** -0.5 * _stretch(rope) ** 2,
        interleaved=interleaved,
        latent=LatentSpec(
            query_rank=config.optional_integer("q_lora_rank"),
            latent_dim=config.integer("kv_lora_rank", 512),
            plain_dim=plain_dim,
            rope_dim=rope_dim,
            value_dim=config.integer("v_head_dim", 128),
            norm=NormSpec(eps=1e-6),
        ),
    )
    activation, bias = read_activation(config, default="silu"), config.flag("mlp_bias", False)
    dense = DenseSpec(width=config.integer("intermediate_size"), activation=activation, bias=bias)
    width, shared = config.integer("moe_intermediate_size"), config.count("n_shared_experts")
    experts = ExpertsSpec(
        num_experts=config.integer("n_routed_experts"),
        width=width,
        routing=routing,
        activation=activation,
        router_correction=correction,
        shared=DenseSpec(width=shared * width, activation=activation, bias=bias) if shared else None,
        names=_NAMES,
    )
    first, step = config.count("first_k_dense_replace"), config.integer("moe_layer_freq", 1)
    return DecoderSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=tuple(
            LayerSpec(attention=attention, feed_forward=experts if number >= first and number % step == 0 else dense)
            for number in range(config.integer("num_hidden_layers"))
        ),
        norm=NormSpec(eps=config.positive("rms_norm_eps", 1e-6)),
        max_positions=positions,
        tied=config.flag("tie_word_embeddings", False),
    )


def _stretch(rope: RopeSpec) -> float:
    """Of the scores of sequences that are longer than the model was first made for."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
