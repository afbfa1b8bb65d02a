"""Qwen3-MoE: Qwen3 with experts."""

from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.layers.head_norm import HeadNormSpec
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.qwen2_moe import sparse_layers
from text_generation_inference.models.qwen3 import TINY as QWEN3_TINY
from text_generation_inference.models.spec import (
    ExpertsSpec,
    check_experts,
    read_activation,
    read_llama_like,
    with_experts,
)

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
TINY = {**QWEN3_TINY, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
VARIANTS = {"dense-layer": {"mlp_only_layers": [0], "norm_topk_prob": False, "sliding_window": None}}


def build(config: Config, context: Context) -> Model:
    config = config.renamed(num_experts="num_local_experts").with_defaults(**DEFAULTS)
    config.refuse("use_sliding_window", False)
    num_experts, top_k = check_experts(config, "num_experts", "num_experts_per_tok")
    experts = ExpertsSpec(
        num_experts=num_experts,
        width=config.integer("moe_intermediate_size", 768),
        routing=SoftmaxRouting(top_k, p_norm=1 if config.flag("norm_topk_prob", False) else None),
        activation=read_activation(config, default="silu"),
    )
    bias = config.flag("attention_bias", False)
    qk_norm = HeadNormSpec(norm=NormSpec(eps=config.positive("rms_norm_eps", 1e-6)))
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)
    return CausalLM(with_experts(spec, experts, sparse_layers(config)), context)
