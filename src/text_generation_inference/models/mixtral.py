"""Mixtral: Mistral with experts in place of every feed-forward."""

from dataclasses import replace

from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.mistral import DEFAULTS as MISTRAL_DEFAULTS
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import (
    FUSED_EXPERTS,
    ExpertNames,
    ExpertsSpec,
    TensorNames,
    check_experts,
    read_activation,
    read_llama_like,
    with_experts,
)

DEFAULTS = {**MISTRAL_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
TINY = {**LLAMA_TINY, "intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24}
NAMES = ExpertNames(matrices=("experts.{}.w1", "experts.{}.w3", "experts.{}.w2"))


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    windows = [config.optional_integer("sliding_window")] * config.integer("num_hidden_layers")
    num_experts, top_k = check_experts(config, "num_local_experts", "num_experts_per_tok")
    experts = ExpertsSpec(
        num_experts=num_experts,
        width=config.integer("intermediate_size"),
        routing=SoftmaxRouting(top_k, p_norm=1),
        activation=read_activation(config, default="silu"),
        names=NAMES,
        other_names=(replace(FUSED_EXPERTS, feed_forward="mlp"), ExpertNames()),  # the last: of quantised versions
    )
    spec = with_experts(read_llama_like(config, windows=windows, theta=1e6), experts)
    return CausalLM(replace(spec, names=TensorNames(feed_forward="block_sparse_moe")), context)
