"""What a GGUF file means as a Hugging Face model: the config, and which stored tensor becomes which weight.

Between `gguf` (format) and `convert` (writing). Owns the architectures that can be converted; knows neither values nor
files to write. llama.cpp stores the rows of Llama query and key projections in the order of its own rotary embedding;
`TensorPlan.row_order` gives them back in the order of the Hugging Face model.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from text_generation_inference.weights.gguf import UNSUPPORTED, GgufFile, GgufTensor, to_float32


@dataclass(frozen=True)
class TensorPlan:
    """One weight of the converted model."""

    name: str  # in the Hugging Face model
    shape: tuple[int, ...]
    source: GgufTensor | None  # None: zeros
    row_order: np.ndarray | None = None  # row i of the weight is stored row `row_order[i]`


@dataclass(frozen=True)
class _Architecture:
    class_name: str
    model_type: str
    permutes: bool  # query and key rows are stored in llama.cpp's rotary order


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", permutes=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", permutes=False),
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)(\.weight)?|rope_factors_.*")

# Llama 3.1 and later are published with these alone; a GGUF file holds only the curve they give.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def read_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` of the model; raises `ModelFormatError` for what no supported model can be."""
    arch_name, arch = _architecture(file)
    hidden_size = file.integer(f"{arch_name}.embedding_length")
    num_heads = file.integer(f"{arch_name}.attention.head_count")
    if num_heads == 0 or hidden_size == 0:
        file.fail(f"`{arch_name}.attention.head_count` is {num_heads} and the embedding length {hidden_size}")
    head_dim = file.integer(f"{arch_name}.attention.key_length", hidden_size // num_heads)
    num_layers = file.integer(f"{arch_name}.block_count")
    if not 0 < num_layers <= len(file.tensors):
        file.fail(f"`{arch_name}.block_count` is {num_layers}, but the file holds {len(file.tensors)} tensors")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        file.fail("the matrix `token_embd.weight` is missing")
    context_length = file.integer(f"{arch_name}.context_length")
    theta = file.number(f"{arch_name}.rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{arch_name}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer(f"{arch_name}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": file.number(f"{arch_name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, arch_name, head_dim, theta, context_length),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": context_length,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token_id(file, "bos", embedding.shape[0]),
        "eos_token_id": _token_id(file, "eos", embedding.shape[0]),
        "pad_token_id": _token_id(file, "padding", embedding.shape[0]),
        "dtype": "float32",
        "torch_dtype": "float32",  # the older spelling
    }
    if arch.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = False
    _check_rotary(file, arch_name, config)
    return config


def read_generation_config(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """The `generation_config.json`: every token that ends a generation."""
    ends = [_token_id(file, name, vocab_size) for name in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": sorted({token for token in ends if token is not None})}
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (token := _token_id(file, name, vocab_size)) is not None:
            config[key] = token
    return config


def plan_tensors(file: GgufFile, config: dict[str, Any]) -> list[TensorPlan]:
    """Every weight of the model that `config` describes, checked for shape; strict both ways."""
    _, arch = _architecture(file)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = _layer_shapes(config)
    biased = {"attn_q", "attn_k", "attn_v"} if arch.model_type == "qwen2" else set()
    if config.get("attention_bias"):
        biased = {"attn_q", "attn_k", "attn_v", "attn_output"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if arch.permutes else {}
    left = {name for name in file.tensors if not _UNUSED.fullmatch(name)}

    def plan(stored: str, name: str, shape: tuple[int, ...], num_heads: int | None, optional: bool) -> TensorPlan:
        source = file.tensors.get(stored)
        if source is None and not optional:
            file.fail(f"tensor `{stored}` is missing")
        if source is not None and source.shape != shape:
            file.fail(f"tensor `{stored}` has shape {source.shape} where the metadata asks for {shape}")
        left.discard(stored)
        order = None if num_heads is None else _rotary_row_order(num_heads, config["head_dim"])
        return TensorPlan(name, shape, source, order)

    plans = [plan("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden), None, False)]
    for layer in range(config["num_hidden_layers"]):
        for part, name in _LAYER_NAMES.items():
            stored, target = f"blk.{layer}.{part}", f"model.layers.{layer}.{name}"
            plans.append(plan(f"{stored}.weight", f"{target}.weight", shapes[part], heads.get(part), False))
            if part in biased:
                # A Llama with biases has one on the output projection too; a file without it means zero.
                rows, optional = shapes[part][:1], part == "attn_output"
                plans.append(plan(f"{stored}.bias", f"{target}.bias", rows, heads.get(part), optional))
    plans.append(plan("output_norm.weight", "model.norm.weight", (hidden,), None, False))
    if not config["tie_word_embeddings"]:
        plans.append(plan("output.weight", "lm_head.weight", (vocab, hidden), None, False))
    if left:
        file.fail(f"tensor {min(left)!r} and {len(left) - 1} others belong to no supported architecture", UNSUPPORTED)
    return plans


def _architecture(file: GgufFile) -> tuple[str, _Architecture]:
    name = file.text("general.architecture")
    if name not in _ARCHITECTURES:
        file.fail(f"holds a model of architecture {name[:40]!r}; llama and qwen2 can be read", UNSUPPORTED)
    if (kind := file.text("general.type", "model")) != "model":
        file.fail(f"holds a {kind[:40]!r}, not a whole model", "Give the GGUF file of the model itself")
    if file.integer("split.count", 1) > 1:
        file.fail("is one part of a split model", "Join the parts with `llama-gguf-split --merge` first")
    if file.integer(f"{name}.expert_count", 0) > 0:
        file.fail("is a mixture of experts, which cannot be read from GGUF", UNSUPPORTED)
    return name, _ARCHITECTURES[name]


def _token_id(file: GgufFile, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token = file.integer(key)
    if token >= vocab_size:
        file.fail(f"`{key}` is {token}, outside the vocabulary of {vocab_size}")
    return token


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key_value = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key_value, hidden),
        "attn_v": (key_value, hidden),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }


def _rotary_row_order(num_heads: int, head_dim: int) -> np.ndarray:
    """Stored: pairs (i, i + head_dim / 2) side by side. Wanted: first halves, then second halves."""
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _check_rotary(file: GgufFile, arch_name: str, config: dict[str, Any]) -> None:
    head_dim, num_heads, num_kv_heads = (config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    if head_dim == 0 or head_dim % 2 or num_kv_heads == 0 or num_heads % num_kv_heads:
        file.fail(
            f"{num_heads} heads, {num_kv_heads} key-value heads of dimension {head_dim} are no possible attention"
        )
    for key in ("rope.dimension_count", "attention.value_length"):
        if (value := file.integer(f"{arch_name}.{key}", head_dim)) != head_dim:
            file.fail(f"`{arch_name}.{key}` is {value}, not the head dimension {head_dim}", UNSUPPORTED)
    for key in ("rms_norm_eps", "rope_theta"):
        if config[key] <= 0:
            file.fail(f"{key} is {config[key]}, but must be positive")


def _rope_scaling(
    file: GgufFile, arch_name: str, head_dim: int, theta: float, context_length: int
) -> dict[str, Any] | None:
    prefix = f"{arch_name}.rope.scaling."
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, prefix, head_dim, theta)
    kind = file.text(prefix + "type", "none")
    factor = file.number(prefix + "factor", file.number(f"{arch_name}.rope.scale_linear", 1.0))
    if factor <= 0:
        file.fail(f"`{prefix}factor` is {factor}, but must be positive")
    if kind == "none" and f"{arch_name}.rope.scale_linear" in file.metadata:
        kind = "linear"  # files from before `rope.scaling` existed
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and file.number(prefix + "attn_factor", 1.0) == 1.0:
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": file.integer(prefix + "original_context_length", context_length),
        }
        for name in ("beta_fast", "beta_slow"):
            if prefix + f"yarn_{name}" in file.metadata:
                scaling[name] = file.number(prefix + f"yarn_{name}")
        return scaling
    file.fail(f"position scaling {kind[:40]!r} cannot be expressed for this model", UNSUPPORTED)


def _llama3_scaling(file: GgufFile, prefix: str, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Recognise the curve of a Llama 3 model; anything else would silently change the positions, so it is refused."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,):
        file.fail(f"tensor `rope_freqs.weight` has shape {tensor.shape} where ({head_dim // 2},) is expected")
    stored = to_float32(file.rows(tensor), tensor.type_name)[0].astype(np.float64)
    factor = float(stored.max())
    context = file.integer(prefix + "original_context_length", _LLAMA3_CONTEXT)
    if factor == 1.0 and (stored == 1.0).all():
        return None
    rotations = context * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    blend = np.clip((rotations - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    if not (
        math.isfinite(factor) and factor > 0 and np.allclose(1 / ((1 - blend) / factor + blend), stored, rtol=1e-3)
    ):
        file.fail("tensor `rope_freqs.weight` is not the position scaling of a Llama 3 model", UNSUPPORTED)
    return {
        "rope_type": "llama3",
        "factor": float(str(np.float32(factor))),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": context,
    }
