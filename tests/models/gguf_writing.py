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
_GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
        "rope_theta": 150000.0,
    },
}
_PHIMOE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "attention_bias": True,
    "lm_head_bias": True,
}
_DEEPSEEK = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK3 = {
    "q_lora_rank": 32,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.75,
        "mscale_all_dim": 0.75,
    },
}
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
    "gemma3, no windows": (
        "gemma3",
        "Gemma3",
        {
            "layer_types": ["full_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt-oss": ("gpt-oss", "GptOss", _GPT_OSS),
    "gpt-oss, MXFP4": ("gpt-oss", "GptOss", _GPT_OSS),
    "granite": (
        "granite",
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("smollm3", "SmolLM3", {"num_hidden_layers": 5}),
    "starcoder2": ("starcoder2", "Starcoder2", {}),
    "command-r": ("command-r", "Cohere", {"logit_scale": 0.75, "use_qk_norm": True}),
    "command-r, no norms of heads": ("command-r", "Cohere", {"logit_scale": 0.75}),
    "cohere2": ("cohere2", "Cohere2", {"logit_scale": 0.75, "sliding_window": 12, "num_hidden_layers": 5}),
    "olmo2": ("olmo2", "Olmo2", {}),
    "stablelm": ("stablelm", "StableLm", {"use_qkv_bias": True}),
    "stablelm, one norm": ("stablelm", "StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "phi2": ("phi2", "Phi", {"intermediate_size": 256, "num_key_value_heads": 4}),
    "gptneox": ("gptneox", "GPTNeoX", {"num_key_value_heads": 4, "use_parallel_residual": True}),
    "gptneox, one after the other": ("gptneox", "GPTNeoX", {"num_key_value_heads": 4, "use_parallel_residual": False}),
    "gpt2": ("gpt2", "GPT2", {"n_inner": 256, "num_key_value_heads": None}),
    "starcoder": ("starcoder", "GPTBigCode", {"n_inner": 256, "num_key_value_heads": None}),
    "bloom": ("bloom", "Bloom", {"num_key_value_heads": None, "intermediate_size": 256}),
    "falcon": (
        "falcon",
        "Falcon",
        {"head_dim": None, "num_key_value_heads": None, "new_decoder_architecture": False, "bias": False},
    ),
    "falcon, groups": (
        "falcon",
        "Falcon",
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "bias": False,
        },
    ),
    "falcon, groups and one norm": (
        "falcon",
        "Falcon",
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 256,
            "bias": False,
        },
    ),
    "mpt": (
        "mpt",
        "Mpt",
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "intermediate_size": 256,
            "attn_config": {"clip_qkv": 0.5},
        },
    ),
    "dbrx": (
        "dbrx",
        "Dbrx",
        {
            **dict.fromkeys(("head_dim", "num_key_value_heads", "hidden_size", "num_hidden_layers")),
            **{"d_model": 64, "n_heads": 4, "n_layers": 2, "num_attention_heads": None},
            "intermediate_size": 32,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 500.0},
            "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64, "moe_num_experts": 6, "moe_top_k": 3},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "phimoe": ("phimoe", "Phimoe", _PHIMOE),
    "phimoe, long": (
        "phimoe",
        "Phimoe",
        {
            **_PHIMOE,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
                "short_factor": [1.0 + i / 8 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "short_mscale": 1.243163121016122,
                "long_mscale": 1.243163121016122,
            },
        },
    ),
    "internlm2": ("internlm2", "Llama", {}),
    "deepseek2": ("deepseek2", "DeepseekV2", _DEEPSEEK),
    "deepseek2, one matrix of latents": ("deepseek2", "DeepseekV2", _DEEPSEEK),
    "deepseek2, groups": (
        "deepseek2",
        "DeepseekV2",
        {**_DEEPSEEK, **_DEEPSEEK3, "topk_method": "group_limited_greedy"},
    ),
    "deepseek2, version 3": ("deepseek2", "DeepseekV3", {**_DEEPSEEK, **_DEEPSEEK3}),
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
    fields = {field: value for field, value in {**SIZES, **changes}.items() if value is not None or field in _NULLS}
    config = getattr(transformers, f"{name}{text}Config")(**fields)
    torch.manual_seed(0)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{head}")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1 and not path.endswith("_norm.weight"):
                parameter.normal_(0, 0.12)
                if not path.endswith(_PLAIN):
                    parameter.copy_(_round(parameter, path, family))
            elif path.endswith(("bias", "sinks")):
                parameter.uniform_(-0.3, 0.3)
            else:
                parameter.uniform_(-0.3, 0.3) if name.startswith("Gemma") else parameter.uniform_(0.7, 1.3)
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    model.save_pretrained(folder / "original")
    tensors, blocks = _store(load_file(folder / "original" / "model.safetensors"), arch, family, config)
    values = _metadata(arch, config) | (_latent_metadata(config, family) if arch == "deepseek2" else {})
    return tiny_gguf.write(folder / "model.gguf", values, tensors, blocks=blocks), model


_NULLS = ("sliding_window", "q_lora_rank")
_PLAIN = ("gate.weight", "router.weight", "router.layer.weight", "wpe.weight", "_bias")  # which no file has in blocks
_TRANSPOSED = re.compile(r".*\.experts\.(gate_up|down)_proj")  # in the model and not in a file
_CONV = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def _round(parameter: torch.Tensor, path: str, family: str) -> torch.Tensor:
    if path.endswith("kv_b_proj.weight") and "one matrix" not in family:
        keys, values = parameter.view(4, 64, -1).split(32, dim=1)
        parts = (_round(keys.transpose(1, 2), "", family).transpose(1, 2), _round(values, "", family))
        return torch.cat(parts, dim=1).view(parameter.shape)
    if path.endswith(".experts.mlp.w2"):
        experts = parameter.view(6, 32, -1).transpose(1, 2)
        return _round(experts, "", family).transpose(1, 2).reshape(parameter.shape)
    turned = (_TRANSPOSED.fullmatch(path) and "gpt-oss" in family) or (family == "gpt2" and path.endswith(_CONV))
    value = parameter.transpose(-1, -2) if turned else parameter
    kind = gguf.GGMLQuantizationType["MXFP4" if "experts" in path and "MXFP4" in family else "Q8_0"]
    rows = gguf.dequantize(gguf.quantize(value.flatten(0, -2).numpy(), kind), kind)
    rounded = torch.from_numpy(rows).view(value.shape)
    return rounded.transpose(-1, -2) if turned else rounded


def _groups_apart(value: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Queries, a key and a value of each group as all queries, all keys, all values."""
    groups = value.reshape(kv_heads, heads // kv_heads + 2, -1, *value.shape[1:])
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return np.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])


def _convert(name: str, value: np.ndarray, arch: str, family: str, config: Any) -> dict[str, np.ndarray]:
    """A tensor of the model as the converter has it, under the names that it looks up."""
    heads = config.num_attention_heads
    if arch in ("llama", "granite", "smollm3", "internlm2") and name.endswith(("q_proj.weight", "k_proj.weight")):
        return {name: tiny_gguf.permute_rows(value, heads if "q_proj" in name else config.num_key_value_heads)}
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return {name: value + 1}
    if arch == "gpt2" and name.endswith(_CONV):
        return {name: value.T}
    if name.endswith("kv_b_proj.weight") and "one matrix" not in family:
        keys, values = np.split(value.reshape(heads, 64, -1), 2, axis=1)
        return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): values}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): value}
    if arch == "gpt-oss":
        return _convert_gpt_oss(name, value)
    if ".experts.mlp." in name:
        experts = value.reshape(config.ffn_config.moe_num_experts, -1, config.d_model)
        return {f"{name}.weight": experts.swapaxes(1, 2) if name.endswith("w2") else experts}
    if "query_key_value" in name:
        shared = (
            1 if arch == "falcon" and not config.new_decoder_architecture else getattr(config, "num_kv_heads", heads)
        )
        return {name.replace("transformer.h", "h") if arch == "bloom" else name: _groups_apart(value, heads, shared)}
    if arch == "bloom":
        return {name.removeprefix("transformer."): value}
    return {name: value}


def _convert_gpt_oss(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    if name.endswith("sinks"):
        return {f"{name}.weight": value}
    if "_proj" not in name or "experts" not in name:
        return {name: value}
    kind = "bias" if name.endswith("_bias") else "weight"
    value = value if kind == "bias" else value.swapaxes(1, 2)
    stem = name.removesuffix("_bias").removesuffix("_proj")
    if stem.endswith("down"):
        return {f"{stem}_proj.{kind}": value}
    stem = stem.removesuffix("gate_up")
    return {f"{stem}{part}_proj.{kind}": value[:, at::2] for at, part in enumerate(("gate", "up"))}


def _store(
    found: dict[str, torch.Tensor], arch: str, family: str, config: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    converted = [
        each
        for name, tensor in found.items()
        for each in _convert(name, tensor.float().numpy(), arch, family, config).items()
    ]
    for name, value in converted:
        if expert := re.fullmatch(r"(.*)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight", name):
            layer = name.split(".")[2]
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(expert[3], expert[3].removesuffix("_proj"))
            stacks.setdefault(f"blk.{layer}.ffn_{part}_exps", {})[int(expert[2])] = value
            continue
        if norm := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(q|k)_layernorm\.norms\.(\d+)\.weight", name):
            stacks.setdefault(f"blk.{norm[1]}.attn_{norm[2]}_norm", {})[int(norm[3])] = value
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensors[stored] = value.reshape(-1) if stored.endswith("shexp.weight") and len(value) == 1 else value
    for stored, each in stacks.items():
        if "each expert" in family:
            stem = stored.removesuffix("_exps")
            tensors |= {f"{stem}.{number}.weight": value for number, value in each.items()}
        else:
            tensors[f"{stored}.weight"] = np.stack([each[number] for number in range(len(each))])
    if _rope(config).get("rope_type") == "longrope":
        for name in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
            tensors[f"rope_factors_{name}.weight"] = factors
    blocks: dict[str, Any] = {}
    for name, value in tensors.items():
        if value.ndim > 1 and name.endswith(".weight") and not re.search("gate_inp|_norm|position_embd", name):
            kind = "MXFP4" if "_exps" in name and "MXFP4" in family else "Q8_0"
            blocks[name] = (kind, gguf.quantize(np.ascontiguousarray(value), gguf.GGMLQuantizationType[kind]))
    return {name: np.ascontiguousarray(value) for name, value in tensors.items() if name not in blocks}, blocks


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("full_attention", rope)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _metadata(arch: str, config: Any) -> dict[str, Any]:
    rope = _rope(config)
    rotated = 16 * rope.get("partial_rotary_factor", 1.0)
    kv_heads = _first(config, "num_kv_heads", "num_key_value_heads") or config.num_attention_heads
    if arch == "starcoder" or (arch == "falcon" and not config.new_decoder_architecture):
        kv_heads = 1
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "feed_forward_length": _first(config, "n_inner", "ffn_hidden_size", "intermediate_size"),
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": _first(config, "rms_norm_eps"),
        "attention.layer_norm_epsilon": _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "attention.key_length": getattr(config, "head_dim", 16),
        "attention.value_length": getattr(config, "head_dim", 16),
        "rope.freq_base": float(rope["rope_theta"]) if rope else None,
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch in ("phi3", "phi2", "gptneox", "stablelm", "cohere2"):
        values["rope.dimension_count"] = int(rotated)
    if arch == "phi3":
        values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    is_windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if getattr(config, "sliding_window", None) and is_windowed and arch != "starcoder2":
        values["attention.sliding_window"] = config.sliding_window
    if arch in ("mpt", "dbrx"):
        attention = config.attn_config
        values["attention.clamp_kqv"] = attention.clip_qkv
        values["attention.layer_norm_epsilon"] = 1e-5
        if arch == "mpt":
            values["attention.max_alibi_bias"] = float(attention.alibi_bias_max)
        else:
            values["attention.head_count_kv"] = attention.kv_n_heads
            values |= {
                "expert_count": config.ffn_config.moe_num_experts,
                "expert_used_count": config.ffn_config.moe_top_k,
            }
    if arch == "gpt-oss":
        values["expert_feed_forward_length"] = config.intermediate_size
    for key, name in (
        ("expert_count", "num_local_experts"),
        ("expert_count", "num_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
        ("logit_scale", "logit_scale"),
        ("use_parallel_residual", "use_parallel_residual"),
    ):
        if getattr(config, name, None) is not None:
            values[key] = getattr(config, name)
    return tiny_gguf.metadata({f"{arch}.{key}": value for key, value in values.items()}, arch)


def _latent_metadata(config: Any, family: str) -> dict[str, Any]:
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    key, value = config.qk_nope_head_dim + rotated, config.v_head_dim
    values: dict[str, Any] = {
        "rope.dimension_count": rotated,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": key,
        "attention.value_length": value,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_gating_func": 2 if "version 3" in family else 1,
        "expert_weights_norm": True if "version 3" in family else None,
    }
    if "one matrix" not in family:
        values |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated, "attention.value_length": rank}
        values |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    if config.q_lora_rank:
        values |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return {f"deepseek2.{key}": value for key, value in values.items() if value is not None}


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
