"""PhiMoE (Phi-3.5-MoE): Mixtral with centred norms, biases, and a routing of its own."""

from dataclasses import replace

from text_generation_inference.kernels.routing import SparseMixerRouting
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.mixtral import NAMES
from text_generation_inference.models.mixtral import TINY as MIXTRAL_TINY
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

DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
}
TINY = {**MIXTRAL_TINY, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.1}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    windows = [config.optional_integer("sliding_window")] * config.integer("num_hidden_layers")
    num_experts, top_k = check_experts(config, "num_local_experts", "num_experts_per_tok")
    if top_k != 2:
        raise config.wrong("num_experts_per_tok", f"is {top_k}, but this routing chooses 2")
    jitter = config.number("router_jitter_noise", 0.01)
    if not jitter >= 0:  # below 0 not even the best expert is near the best one
        raise config.wrong("router_jitter_noise", f"must be at least 0, it is {jitter}")
    experts = ExpertsSpec(
        num_experts=num_experts,
        width=config.integer("intermediate_size"),
        routing=SparseMixerRouting(jitter),
        activation=read_activation(config, default="silu"),
        names=NAMES,
        other_names=(replace(FUSED_EXPERTS, feed_forward="mlp", router="router"), ExpertNames()),
    )
    bias = config.flag("attention_bias", False)
    spec = read_llama_like(_with_scale(config), qkv_bias=bias, out_bias=bias, windows=windows, theta=1e6)
    spec = replace(
        with_experts(spec, experts),
        norm=NormSpec(eps=config.positive("rms_norm_eps"), is_centred=True, bias=True),
        head_bias=config.flag("lm_head_bias", False),
        names=TensorNames(feed_forward="block_sparse_moe"),
    )
    return CausalLM(spec, context)


def _with_scale(config: Config) -> Config:
    """Positions beyond the original ones come with a factor that the config says, for either list of frequencies."""
    name = "rope_parameters" if config.get("rope_scaling") is None else "rope_scaling"
    rope = config.inner(name)
    short, long = (rope.optional_positive(f"{each}_mscale") for each in ("short", "long"))
    if short != long:
        raise rope.wrong("long_mscale", "is not `short_mscale`, which is not supported")
    if short is None:
        return config
    return Config({**config.fields, name: {**rope.fields, "attention_factor": short}}, config.source)
