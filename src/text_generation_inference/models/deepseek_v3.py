"""DeepSeek V3 (R1, V3.1, Kimi-K2): V2 with experts that are chosen each by itself, with a correction."""

from dataclasses import replace

from text_generation_inference.kernels.routing import SigmoidRouting
from text_generation_inference.models.config import Config
from text_generation_inference.models.decoder import CausalLM
from text_generation_inference.models.deepseek_v2 import TINY as V2_TINY
from text_generation_inference.models.deepseek_v2 import YARN, read_groups, read_latent_decoder
from text_generation_inference.models.model import Context, Model
from text_generation_inference.models.spec import TensorNames, check_experts

DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}
TINY = {
    **V2_TINY,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 24,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": YARN,
}
_NAMES = TensorNames(further="eh_proj")
VARIANTS = {"one-group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False}}


def build(config: Config, context: Context) -> Model:
    config = config.with_defaults(**DEFAULTS)
    config.refuse("topk_method", "noaux_tc")
    config.refuse("scoring_func", "sigmoid")
    experts, top_k = check_experts(config, "n_routed_experts", "num_experts_per_tok")
    groups, top_groups = read_groups(config)
    if experts // groups < 2:
        raise config.wrong("n_group", f"is {groups}: groups are judged by their two best of {experts} experts")
    routing = SigmoidRouting(
        top_k,
        normalized=config.flag("norm_topk_prob", True),
        factor=config.positive("routed_scaling_factor", 2.5),
        num_groups=groups,
        top_groups=top_groups,
    )
    interleaved = config.flag("rope_interleave", True)
    spec = read_latent_decoder(config, routing, interleaved=interleaved, correction=True)
    return CausalLM(replace(spec, names=_NAMES), context)
