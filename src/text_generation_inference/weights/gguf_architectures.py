"""The architectures of GGUF files that can be read: which tensor is which, and what a file says of the config.

`gguf_model` plans tensors and reads what all architectures share. One entry of `ARCHITECTURES` is one architecture as
llama.cpp's converter writes it; what its config.json says beyond the common fields is a function of the file here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from text_generation_inference.weights.gguf import UNSUPPORTED, GgufFile, to_float32

Fields = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    class_name: str
    model_type: str
    names: Mapping[str, str]  # of a layer's tensors: in the file -> in the Hugging Face model
    experts: Mapping[str, str] = field(default_factory=dict[str, str])  # of an expert's, with a place for its number
    permutes: bool = False  # query and key rows are stored in llama.cpp's rotary order
    biased: tuple[str, ...] = ()
    norm_offset: float = 0.0  # what the converter has added to the weights of norms
    scales_positions: bool = True  # knows linear, yarn and Llama 3's scaling, as Llama does
    rotates_part: bool = False  # fewer dimensions of a head than it has may be rotated
    read: Callable[[GgufFile, Fields], Fields] = lambda file, config: {}


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROUTED = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {f"ffn_{part}": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}


def _llama(file: GgufFile, config: Fields) -> Fields:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def _mixtral(file: GgufFile, config: Fields) -> Fields:
    return {
        "num_local_experts": file.integer("llama.expert_count"),
        "num_experts_per_tok": file.integer("llama.expert_used_count"),
        "sliding_window": None,
    }


def _qwen_experts(file: GgufFile, arch: str, normalised: bool) -> Fields:
    return {
        "num_experts": file.integer(f"{arch}.expert_count"),
        "num_experts_per_tok": file.integer(f"{arch}.expert_used_count"),
        "moe_intermediate_size": _width(file, f"{arch}.expert_feed_forward_length", "blk.0.ffn_down_exps.weight"),
        "norm_topk_prob": normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _width(file: GgufFile, key: str, tensor: str) -> int:
    """Older files leave the key out; then it is the last dimension of a tensor."""
    found = file.tensors.get(tensor)
    return file.integer(key, found.shape[-1] if found is not None else None)


def _qwen2_moe(file: GgufFile, config: Fields) -> Fields:
    shared = _width(file, "qwen2moe.expert_shared_feed_forward_length", "blk.0.ffn_down_shexp.weight")
    return {**_qwen_experts(file, "qwen2moe", False), "shared_expert_intermediate_size": shared}


def _qwen3_moe(file: GgufFile, config: Fields) -> Fields:
    return {**_qwen_experts(file, "qwen3moe", True), "attention_bias": False}


def _gemma(file: GgufFile, config: Fields) -> Fields:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _scalar(config: Fields, layers_of_27b: int) -> int:
    """What scores are divided by the root of. Not in the file: llama.cpp knows the largest model by its layers."""
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _gemma2(file: GgufFile, config: Fields) -> Fields:
    layers = config["num_hidden_layers"]
    return {
        **_gemma(file, config),
        "query_pre_attn_scalar": _scalar(config, 46),
        "attn_logit_softcapping": file.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("gemma2.final_logit_softcapping", 30.0),
        "sliding_window": file.integer("gemma2.attention.sliding_window", 4096),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
    }


def _gemma3(file: GgufFile, config: Fields) -> Fields:
    return {
        **_gemma(file, config),
        "rope_theta": file.number("gemma3.rope.freq_base", 1e6),
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _scalar(config, 62),
        "sliding_window": file.integer("gemma3.attention.sliding_window", 1024),
        "layer_types": [
            "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(config["num_hidden_layers"])
        ],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _refuse_scaling(file: GgufFile, arch: str) -> None:
    """Of a family that has none but its lists of factors: what would otherwise be left out in silence."""
    kind = file.text(f"{arch}.rope.scaling.type", "none")
    factor = file.number(f"{arch}.rope.scaling.factor", file.number(f"{arch}.rope.scale_linear", 1.0))
    if kind not in ("none", "longrope") and factor != 1.0:
        file.fail(f"position scaling {kind[:40]!r} is not known of this architecture", UNSUPPORTED)


def _phi3(file: GgufFile, config: Fields) -> Fields:
    rotated = file.integer("phi3.rope.dimension_count", config["head_dim"])
    original = file.integer("phi3.rope.scaling.original_context_length", config["max_position_embeddings"])
    window = file.integer("phi3.attention.sliding_window", 0)
    fields: Fields = {
        "partial_rotary_factor": rotated / config["head_dim"],
        "original_max_position_embeddings": original,
        "sliding_window": window or None,
        "attention_bias": False,
    }
    lists = [file.tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")]
    if not all(lists):
        _refuse_scaling(file, "phi3")
        return fields
    values = [to_float32(file.rows(each), each.type_name).reshape(-1).tolist() for each in lists if each is not None]
    if any(len(each) != rotated // 2 for each in values):
        file.fail(f"the tensors `rope_factors_short` and `_long` should have {rotated // 2} values")
    scaling: Fields = {"rope_type": "longrope", "short_factor": values[0], "long_factor": values[1]}
    stretch = config["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    factor = file.number("phi3.rope.scaling.attn_factor", usual)
    if not math.isclose(factor, usual, rel_tol=1e-5):
        scaling["attention_factor"] = factor
    return {**fields, "rope_scaling": scaling}


_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", {**_ATTENTION, **_DENSE}, permutes=True, read=_llama),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", {**_ATTENTION, **_DENSE}, biased=("attn_q", "attn_k", "attn_v")),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_ATTENTION, **_ROUTED, **_SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        _EXPERTS,
        biased=("attn_q", "attn_k", "attn_v"),
        read=_qwen2_moe,
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        {**_ATTENTION, **_DENSE, **_HEAD_NORMS},
        read=lambda file, config: {"attention_bias": False},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**_ATTENTION, **_ROUTED, **_HEAD_NORMS}, _EXPERTS, read=_qwen3_moe
    ),
    "gemma": Architecture(
        "GemmaForCausalLM",
        "gemma",
        {**_ATTENTION, **_DENSE},
        norm_offset=1.0,
        read=_gemma,
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        {**_ATTENTION, **_DENSE, **_SANDWICH},
        norm_offset=1.0,
        read=_gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_ATTENTION, **_DENSE, **_SANDWICH, **_HEAD_NORMS},
        norm_offset=1.0,
        read=_gemma3,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", "phi3", _FUSED, scales_positions=False, rotates_part=True, read=_phi3
    ),
}  # fmt: skip
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    {**_ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    {
        f"ffn_{part}": f"block_sparse_moe.experts.{{}}.{name}"
        for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    permutes=True,
    read=_mixtral,
)


def find_architecture(file: GgufFile, name: str) -> Architecture | None:
    """By its name in the file; a Llama with experts is a Mixtral."""
    if name == "llama" and file.integer("llama.expert_count", 0) > 0:
        return _MIXTRAL
    return ARCHITECTURES.get(name)


def layer_shapes(arch: Architecture, config: Fields) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a layer may have, by their names in a file."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key_value = (config[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), (hidden,)
    )
    shapes |= {"attn_q": (query, hidden), "attn_k": (key_value, hidden), "attn_v": (key_value, hidden)}
    shapes |= {"attn_output": (hidden, query), "attn_qkv": (query + 2 * key_value, hidden)}
    shapes |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
    fused = "ffn_gate" not in arch.names  # gate and up are one matrix
    shapes |= {
        "ffn_gate": (inner, hidden),
        "ffn_up": ((2 if fused else 1) * inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shared = config.get("shared_expert_intermediate_size", 0)
    shapes |= {"ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden), "ffn_down_shexp": (hidden, shared)}
    shapes |= {"ffn_gate_inp": (count_experts(config), hidden), "ffn_gate_inp_shexp": (1, hidden)}
    return shapes


def count_experts(config: Fields) -> int:
    return config.get("num_local_experts", config.get("num_experts", 0))


def expert_shapes(config: Fields) -> dict[str, tuple[int, int]]:
    """Of one expert's matrices."""
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    return {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
