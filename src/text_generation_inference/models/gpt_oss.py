"""GPT-OSS: windows on every second layer, a sink beside the scores of each head, experts with biases and a clamp."""

from typing import Any

from text_generation_inference.kernels.routing import SoftmaxRouting
from text_generation_inference.models.config import Config, windows_by_layer
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.llama import TINY as LLAMA_TINY
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import (
    ExpertLayout,
    ExpertNames,
    ExpertsSpec,
    check_experts,
    read_llama_like,
    with_attention,
    with_experts,
)

DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_local_experts": 128,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
TINY: dict[str, Any] = {
    **LLAMA_TINY,
    "intermediate_size": 32,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": {**_YARN, "original_max_position_embeddings": 64, "factor": 4.0, "rope_theta": 150000.0},
}
_EXPERTS = ExpertNames(
    router="router",
    matrices=("experts.gate_up_proj", "experts.down_proj"),
    layout=ExpertLayout.FUSED_TRANSPOSED,
    alternating=True,
    biases=("experts.gate_up_proj_bias", "experts.down_proj_bias"),
)
# Of quantised versions, which have tensors for each expert: of GPTQModel, AutoRound and llm-compressor; of GPTQModel
# before; of Unsloth, in bitsandbytes.
_PAIRS = ("experts.gate_up_projs.{}", "experts.down_projs.{}")
_OTHER_EXPERTS = (
    ExpertNames(router="router"),
    ExpertNames(router="router", matrices=("experts.gate_up.{}", "experts.down.{}")),
    ExpertNames(router="router.linear", matrices=_PAIRS),
)


def build(config: Config, context: Context) -> Model:
    config = config.renamed(num_experts_per_tok="experts_per_token", num_local_experts="num_experts")
    config = config.with_defaults(**DEFAULTS, num_experts_per_tok=4)
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = Config({**config.fields, "rope_parameters": _YARN}, config.source)
    config.refuse("hidden_act", "silu")
    config.refuse("swiglu_limit", 7, 7.0)
    config.refuse("swiglu_alpha", 1.702)
    num_layers = config.integer("num_hidden_layers")
    windows = windows_by_layer(
        config, num_layers, [layer % 2 == 0 for layer in range(num_layers)], config.optional_integer("sliding_window")
    )
    bias = config.flag("attention_bias", True)
    num_experts, top_k = check_experts(config, "num_local_experts", "num_experts_per_tok")
    experts = ExpertsSpec(
        num_experts=num_experts,
        width=config.integer("intermediate_size"),
        routing=SoftmaxRouting(top_k, p_norm=1),  # which is a softmax over the chosen ones
        activation="clamped_swiglu",
        router_bias=True,
        names=_EXPERTS,
        other_names=_OTHER_EXPERTS,
    )
    spec = read_llama_like(config, qkv_bias=bias, out_bias=bias, windows=windows, theta=150000.0)
    return CausalLM(with_experts(with_attention(spec, sinks="sinks"), experts), context)
