"""What a GGUF file means as a Hugging Face model: the config, and which stored tensor becomes which weight.

Between `gguf` (format) and `convert` (writing). What differs between architectures is in `gguf_architectures`; knows
neither values nor files to write. llama.cpp stores the rows of Llama query and key projections in the order of its own
rotary embedding; `TensorPlan.row_order` gives them back in the order of the Hugging Face model.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from text_generation_inference.weights.gguf import UNSUPPORTED, GgufFile, GgufTensor, to_float32
from text_generation_inference.weights.gguf_architectures import (
    ARCHITECTURES,
    Architecture,
    count_experts,
    expert_shapes,
    find_architecture,
    layer_shapes,
)


@dataclass(frozen=True)
class TensorPlan:
    """One weight of the converted model."""

    name: str  # in the Hugging Face model
    shape: tuple[int, ...]
    source: GgufTensor | None  # None: zeros
    row_order: np.ndarray | None = None  # row i of the weight is stored row `row_order[i]`
    first_row: int = 0  # of the stored tensor, which may hold a matrix for each expert
    offset: float = 0.0  # added to the stored values

    @property
    def keeps_blocks(self) -> bool:
        """Whether its stored rows are rows of a matrix."""
        return self.source is not None and len(self.shape) == 2 and len(self.source.shape) >= 2

    def stored_rows(self, file: GgufFile) -> np.ndarray:
        """In the order of the file."""  # uint8 [rows, bytes]
        assert self.source is not None
        rows = file.rows(self.source)
        return rows[self.first_row : self.first_row + self.shape[0]] if self.keeps_blocks else rows


_UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)(\.weight)?")
_ROPE_FACTORS = re.compile(r"rope_factors_(long|short)\.weight")

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
    scaling = _rope_scaling(file, arch_name, head_dim, theta, context_length) if arch.scales_positions else None
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{arch_name}.feed_forward_length", None if not arch.experts else 1),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer(f"{arch_name}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": file.number(f"{arch_name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": context_length,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token_id(file, "bos", embedding.shape[0]),
        "eos_token_id": _token_id(file, "eos", embedding.shape[0]),
        "pad_token_id": _token_id(file, "padding", embedding.shape[0]),
        "dtype": "float32",
        "torch_dtype": "float32",  # the older spelling
    }
    config |= arch.read(file, config)
    _check_rotary(file, arch_name, arch, config)
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
    planner = _Planner(file, arch, config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = layer_shapes(arch, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if arch.permutes else {}
    biased = arch.biased
    if config.get("attention_bias"):
        biased = ("attn_q", "attn_k", "attn_v", "attn_output")
    plans = [planner.plan("token_embd.weight", "model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(config["num_hidden_layers"]):
        for part, name in arch.names.items():
            stored, target = f"blk.{layer}.{part}", f"model.layers.{layer}.{name}"
            plans.append(planner.plan(f"{stored}.weight", f"{target}.weight", shapes[part], heads.get(part)))
            if part in biased:
                # A Llama with biases has one on the output projection too; a file without it means zero.
                rows, optional = shapes[part][:1], part == "attn_output"
                plans.append(planner.plan(f"{stored}.bias", f"{target}.bias", rows, heads.get(part), optional))
        for part, name in arch.experts.items():
            plans += planner.plan_experts(layer, part, name)
    plans.append(planner.plan("output_norm.weight", "model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        plans.append(planner.plan("output.weight", "lm_head.weight", (vocab, hidden)))
    planner.check_left()
    return plans


class _Planner:
    def __init__(self, file: GgufFile, arch: Architecture, config: dict[str, Any]) -> None:
        self.file, self.arch, self.config = file, arch, config
        has_factors = arch.model_type == "phi3"  # which are in its config
        self.left = {
            name
            for name in file.tensors
            if not _UNUSED.fullmatch(name) and not (has_factors and _ROPE_FACTORS.fullmatch(name))
        }

    def plan(
        self, stored: str, name: str, shape: tuple[int, ...], num_heads: int | None = None, optional: bool = False
    ) -> TensorPlan:
        source = self.file.tensors.get(stored)
        if source is None and not optional:
            self.file.fail(f"tensor `{stored}` is missing")
        if source is not None and source.shape not in (shape, shape[1:] if shape[0] == 1 else shape):
            self.file.fail(f"tensor `{stored}` has shape {source.shape} where the metadata asks for {shape}")
        self.left.discard(stored)
        order = None if num_heads is None else _rotary_row_order(num_heads, self.config["head_dim"])
        offset = -self.arch.norm_offset if stored.endswith("norm.weight") else 0.0
        return TensorPlan(name, shape, source, order, offset=offset)

    def plan_experts(self, layer: int, part: str, name: str) -> list[TensorPlan]:
        """From one tensor for all experts, or, in older files, from one for each."""
        count, shape = count_experts(self.config), expert_shapes(self.config)[part]
        target = f"model.layers.{layer}.{name}.weight"
        stored = f"blk.{layer}.{part}_exps.weight"
        source = self.file.tensors.get(stored)
        if source is None:
            names = [(f"blk.{layer}.{part}.{number}.weight", target.format(number)) for number in range(count)]
            return [self.plan(*each, shape) for each in names]
        if source.shape != (count, *shape):
            self.file.fail(f"tensor `{stored}` has shape {source.shape} where the metadata asks for {(count, *shape)}")
        self.left.discard(stored)
        return [
            TensorPlan(target.format(number), shape, source, first_row=number * shape[0]) for number in range(count)
        ]

    def check_left(self) -> None:
        if self.left:
            first, others = min(self.left), len(self.left) - 1
            self.file.fail(f"tensor {first!r} and {others} others belong to no supported architecture", UNSUPPORTED)


def _architecture(file: GgufFile) -> tuple[str, Architecture]:
    name = file.text("general.architecture")
    if (kind := file.text("general.type", "model")) != "model":
        file.fail(f"holds a {kind[:40]!r}, not a whole model", "Give the GGUF file of the model itself")
    arch = find_architecture(file, name)
    if arch is None:
        known = ", ".join(ARCHITECTURES)
        file.fail(f"holds a model of architecture {name[:40]!r}; {known} can be read", UNSUPPORTED)
    if not arch.experts and file.integer(f"{name}.expert_count", 0) > 0:
        file.fail("is a mixture of experts, which cannot be read from GGUF for this architecture", UNSUPPORTED)
    return name, arch


def _token_id(file: GgufFile, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token = file.integer(key)
    if token >= vocab_size:
        file.fail(f"`{key}` is {token}, outside the vocabulary of {vocab_size}")
    return token


def _rotary_row_order(num_heads: int, head_dim: int) -> np.ndarray:
    """Stored: pairs (i, i + head_dim / 2) side by side. Wanted: first halves, then second halves."""
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _check_rotary(file: GgufFile, arch_name: str, arch: Architecture, config: dict[str, Any]) -> None:
    head_dim, num_heads, num_kv_heads = (config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    if head_dim == 0 or head_dim % 2 or num_kv_heads == 0 or num_heads % num_kv_heads:
        file.fail(
            f"{num_heads} heads, {num_kv_heads} key-value heads of dimension {head_dim} are no possible attention"
        )
    for key in ("rope.dimension_count", "attention.value_length"):
        if arch.rotates_part and key == "rope.dimension_count":
            continue
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
