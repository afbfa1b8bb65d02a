"""Tiny models of `transformers` as the GGUF files that llama.cpp's converter makes of them."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_gguf
import torch
import transformers
from safetensors.torch import load_file

from gguf_blocks import random_blocks
from text_generation_inference.weights.convert import convert_gguf

SIZES = {
    "vocab_size": len(tiny_gguf.TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
# What a file is called, which class it is, and what its config has beyond the sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("llama", "Mistral", {"sliding_window": None}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral, a tensor for each expert": ("llama", "Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
        },
    ),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gemma": ("gemma", "Gemma", {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": _LINEAR}),
    "gemma2": ("gemma2", "Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16, "rope_parameters": _LINEAR}),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", "Phi3", {"sliding_window": 12}),
    "phi3, long": (
        "phi3",
        "Phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **_FACTORS},
        },
    ),
}


def make(family: str, folder: Path) -> tuple[Path, Any]:
    """The file, and the model with the values that its blocks stand for."""
    arch, name, changes = FAMILIES[family]
    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:
                exact = parameter.normal_(0, 0.12).flatten(0, -2).numpy()
                if not path.endswith("gate.weight"):
                    parameter.copy_(torch.from_numpy(_round(exact)).view(parameter.shape))
            else:
                parameter.uniform_(-0.3, 0.3) if name.startswith("Gemma") else parameter.uniform_(0.7, 1.3)
    model.save_pretrained(folder / "original")
    tensors, blocks = _store(load_file(folder / "original" / "model.safetensors"), arch, family, config)
    values = _metadata(arch, config)
    return tiny_gguf.write(folder / "model.gguf", values, tensors, blocks=blocks), model


def _round(rows: np.ndarray) -> np.ndarray:
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.dequantize(gguf.quantize(rows, kind), kind)


def _store(
    found: dict[str, torch.Tensor], arch: str, family: str, config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in found.items():
        value = tensor.float().numpy()
        if expert := re.fullmatch(r"(.*)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight", name):
            layer = name.split(".")[2]
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(expert[3], expert[3].removesuffix("_proj"))
            experts.setdefault(f"blk.{layer}.ffn_{part}", {})[int(expert[2])] = value
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = tiny_gguf.permute_rows(value, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        tensors[stored] = value.reshape(-1) if stored.endswith("shexp.weight") and len(value) == 1 else value
    for stored, each in experts.items():
        if "each expert" in family:
            tensors |= {f"{stored}.{number}.weight": value for number, value in each.items()}
        else:
            tensors[f"{stored}_exps.weight"] = np.stack([each[number] for number in range(len(each))])
    if config.rope_parameters.get("rope_type") == "longrope":
        for name in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
            tensors[f"rope_factors_{name}.weight"] = factors
    blocks = {
        name: ("Q8_0", gguf.quantize(value, gguf.GGMLQuantizationType.Q8_0))
        for name, value in tensors.items()
        if value.ndim > 1 and "gate_inp" not in name
    }
    return {name: value for name, value in tensors.items() if name not in blocks}, blocks


def _metadata(arch: str, config: Any) -> dict[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values = {
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": getattr(config, "head_dim", 16),
        "attention.value_length": getattr(config, "head_dim", 16),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if arch == "phi3":
        values["rope.dimension_count"] = int(16 * rope.get("partial_rotary_factor", 1.0))
        values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if getattr(config, "sliding_window", None):
        values["attention.sliding_window"] = config.sliding_window
    for key, name in (
        ("expert_count", "num_local_experts"),
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        if getattr(config, name, None) is not None:
            values[key] = getattr(config, name)
    return tiny_gguf.metadata({f"{arch}.{key}": value for key, value in values.items()}, arch)


# Which type the matrices of a file have; those not named have the first.
MIXES = {
    "Q4_K_M": {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"},
    "Q5_K_S": {"": "Q5_K", "token_embd": "Q8_0"},
    "small blocks": {"": "Q5_0", "attn_v": "Q5_1", "ffn_down": "IQ4_NL", "token_embd": "Q4_1"},
    "few bits": {"": "Q2_K", "attn_v": "Q3_K", "ffn_down": "Q3_K", "token_embd": "Q6_K"},
}


def write_mix(name: str, folder: Path) -> Path:
    """A converted Llama with random blocks of these types."""
    kinds, blocks = MIXES[name], {}
    tensors = tiny_gguf.weights(hidden=256, inner=512)
    for seed, each in enumerate([each for each, value in tensors.items() if value.ndim == 2]):
        kind = next((kinds[part] for part in kinds if part and part in each), kinds[""])
        blocks[each] = (kind, random_blocks(kind, *tensors.pop(each).shape, seed=seed, largest=0.2))
    sizes = {"llama.embedding_length": 256, "llama.feed_forward_length": 512}
    path = tiny_gguf.write(folder / "a.gguf", tiny_gguf.metadata(sizes), tensors, blocks=blocks)
    convert_gguf(path, folder / "out")
    return folder / "out"
