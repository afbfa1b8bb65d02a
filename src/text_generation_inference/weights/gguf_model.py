"""What a GGUF file means as a Hugging Face model: the config, and which stored tensor becomes which weight.

Between `gguf` (format) and `convert` (writing). What differs between architectures is in `gguf_architectures`; knows
no files to write, and of values only those that a weight takes from several tensors. llama.cpp stores the rows of Llama
query and key projections in the order of its own rotary embedding; `TensorPlan.row_order` gives them back in the order
of the Hugging Face model.
"""

import math
import re
from collections.abc import Callable
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
    outside_shapes,
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
    make: Callable[[], np.ndarray] | None = None  # the values, where they are in no single tensor as they are wanted

    @property
    def keeps_blocks(self) -> bool:
        """Whether its stored rows are rows of a matrix."""
        return self.source is not None and len(self.shape) == 2 and len(self.source.shape) >= 2

    def stored_rows(self, file: GgufFile) -> np.ndarray:
        """In the order of the file."""  # uint8 [rows, bytes]
        assert self.source is not None
        rows = file.rows(self.source)
        return rows[self.first_row :][: self.shape[0] if self.keeps_blocks else 1]


_UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)(\.weight)?")
_ROPE_FACTORS = re.compile(r"rope_factors_(long|short)\.weight")

# What would change what is computed, and is not read but of those that know it.
_UNREAD = ("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale")

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
    if head_dim == 0:
        file.fail(f"{num_heads} heads of an embedding of {hidden_size} have no dimension")
    num_layers = file.integer(f"{arch_name}.block_count")
    if not 0 < num_layers <= len(file.tensors):
        file.fail(f"`{arch_name}.block_count` is {num_layers}, but the file holds {len(file.tensors)} tensors")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        file.fail("the matrix `token_embd.weight` is missing")
    context_length = file.integer(f"{arch_name}.context_length")
    theta = file.number(f"{arch_name}.rope.freq_base", 10000.0)
    scales = arch.scales_positions and arch.rotates
    scaling = _rope_scaling(file, arch_name, head_dim, theta, context_length) if scales else None
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
        arch.eps: file.number(f"{arch_name}.attention.layer_norm_{'' if arch.centres else 'rms_'}epsilon"),
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
    _check_unread(file, arch_name, arch)
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
    plans = planner.plan_outside(("token_embd", "token_embd_norm", "position_embd"))
    for layer in range(config["num_hidden_layers"]):
        has_experts = layer >= config.get("first_k_dense_replace", 0)
        for part, name in {**arch.names, **(arch.routed if has_experts else arch.leading)}.items():
            plans += planner.plan_part(layer, part, name)
        for part, name in arch.experts.items() if has_experts else ():
            plans += planner.plan_experts(layer, part, name)
        if arch.expert_biases:
            plans += planner.plan_expert_biases(layer)
    plans += planner.plan_outside(("output_norm",) if config["tie_word_embeddings"] else ("output_norm", "output"))
    planner.check_left()
    return plans


class _Planner:
    def __init__(self, file: GgufFile, arch: Architecture, config: dict[str, Any]) -> None:
        self.file, self.arch, self.config = file, arch, config
        self.shapes = layer_shapes(arch, config)
        self.absent = {part for part in arch.optional if f"blk.0.{part}.weight" not in file.tensors}
        biases = {part for part in arch.may_be_biased if f"blk.0.{part}.bias" in file.tensors}
        self.biased = {*arch.biased, *biases}
        if config.get("attention_bias"):
            self.biased |= {"attn_q", "attn_k", "attn_v", "attn_output"}
        self.left = {
            name
            for name in file.tensors
            if not _UNUSED.fullmatch(name) and not (arch.has_factors and _ROPE_FACTORS.fullmatch(name))
        }

    def plan_outside(self, parts: tuple[str, ...]) -> list[TensorPlan]:
        shapes, plans = outside_shapes(self.config), list[TensorPlan]()
        for part in parts:
            if (name := self.arch.outside.get(part)) is not None:
                plans.append(self.plan(f"{part}.weight", f"{name}.weight", shapes[part]))
                if part in self.biased:
                    plans.append(self.plan(f"{part}.bias", f"{name}.bias", shapes[part][:1]))
        return plans

    def plan_part(self, layer: int, part: str, name: str) -> list[TensorPlan]:
        stored, target, shape = f"blk.{layer}.{part}", f"{self.arch.layer.format(layer)}.{name}", self.shapes[part]
        if "." in part:  # a whole name
            return [self.plan(stored, target, shape)]
        if part == "attn_kv_b":
            return [self.plan_latent(layer, target)]
        if part in self.absent:
            return []
        if self.arch.model_type == "stablelm" and part in ("attn_q_norm", "attn_k_norm"):
            return self.plan_rows(f"{stored}.weight", target + ".norms.{}.weight", shape)
        plans = [self.plan(f"{stored}.weight", f"{target}.weight", shape, part)]
        if part in self.biased:
            # A Llama with biases has one on the output projection too; a file without it means zero.
            optional = part == "attn_output" and part not in self.arch.biased
            plans.append(self.plan(f"{stored}.bias", f"{target}.bias", shape[:1], part, optional))
        return plans

    def row_order(self, part: str) -> np.ndarray | None:
        heads, kv_heads, dim = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if self.arch.permutes and part in ("attn_q", "attn_k"):
            return _rotary_row_order(heads if part == "attn_q" else kv_heads, dim)
        if self.arch.groups and part == "attn_qkv":
            return _grouped_row_order(heads, kv_heads, dim)
        return None

    def plan(
        self,
        stored: str,
        name: str,
        shape: tuple[int, ...],
        part: str = "",
        optional: bool = False,
    ) -> TensorPlan:
        source = self.take(stored, shape, optional)
        order = self.row_order(part)
        offset = -self.arch.norm_offset if stored.endswith("norm.weight") else 0.0
        return TensorPlan(name, shape, source, order, offset=offset)

    def take(self, stored: str, shape: tuple[int, ...], optional: bool = False) -> GgufTensor | None:
        source = self.file.tensors.get(stored)
        if source is None and not optional:
            self.file.fail(f"tensor `{stored}` is missing")
        if source is not None and source.shape not in (shape, shape[1:] if shape[0] == 1 else shape):
            self.file.fail(f"tensor `{stored}` has shape {source.shape} where the metadata asks for {shape}")
        self.left.discard(stored)
        return source

    def plan_rows(self, stored: str, name: str, shape: tuple[int, ...]) -> list[TensorPlan]:
        """A weight of each row."""
        source = self.take(stored, shape)
        return [TensorPlan(name.format(row), shape[1:], source, first_row=row) for row in range(shape[0])]

    def plan_latent(self, layer: int, target: str) -> TensorPlan:
        """Newer files have what makes keys of a latent the other way round, and apart from what makes values.

        It is taken apart when a model is loaded, and so never kept in blocks.
        """
        names = ("attn_k_b", "attn_v_b") if "attn_kv_b" in self.absent else ("attn_kv_b",)
        sources = [self.take(f"blk.{layer}.{name}.weight", self.shapes[name]) for name in names]

        def join() -> np.ndarray:
            found: list[np.ndarray] = []
            for each in sources:
                assert each is not None
                found.append(to_float32(self.file.rows(each), each.type_name).reshape(each.shape))
            return found[0] if len(found) == 1 else np.concatenate((found[0].swapaxes(1, 2), found[1]), axis=1)

        return TensorPlan(f"{target}.weight", self.shapes["attn_kv_b"], None, make=join)

    def plan_expert_biases(self, layer: int) -> list[TensorPlan]:
        """From one tensor for all experts."""
        count, target = count_experts(self.config), f"{self.arch.layer.format(layer)}.mlp.experts"
        plans: list[TensorPlan] = []
        for part, (rows, _) in expert_shapes(self.config).items():
            name = f"{target}.{{}}.{part.removeprefix('ffn_')}_proj.bias"
            plans += self.plan_rows(f"blk.{layer}.{part}_exps.bias", name, (count, rows))
        return plans

    def plan_experts(self, layer: int, part: str, name: str) -> list[TensorPlan]:
        """From one tensor for all experts, or, in older files, from one for each."""
        count, shape = count_experts(self.config), expert_shapes(self.config)[part]
        target = f"{self.arch.layer.format(layer)}.{name}.weight"
        stored = f"blk.{layer}.{part}_exps.weight"
        source = self.file.tensors.get(stored)
        if source is None:
            single = f"blk.{layer}.{part}.{{}}.weight"
            return [self.plan(single.format(number), target.format(number), shape) for number in range(count)]
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
    if token >= vocab_size and name == "padding":
        return None  # of no use here, and often not there: files name 32000 of 32000, or -1 as 2**32 - 1
    if token >= vocab_size:
        file.fail(f"`{key}` is {token}, outside the vocabulary of {vocab_size}")
    return token


def _rotary_row_order(num_heads: int, head_dim: int) -> np.ndarray:
    """Stored: pairs (i, i + head_dim / 2) side by side. Wanted: first halves, then second halves."""
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _grouped_row_order(num_heads: int, num_kv_heads: int, head_dim: int) -> np.ndarray:
    """Stored: all queries, all keys, all values. Wanted: for each key its queries, itself and its value."""
    stored = np.arange((num_heads + 2 * num_kv_heads) * head_dim).reshape(-1, head_dim)
    queries, keys, values = np.split(stored, [num_heads, num_heads + num_kv_heads])
    groups = queries.reshape(num_kv_heads, -1, head_dim)
    return np.concatenate((groups, keys[:, None], values[:, None]), axis=1).reshape(-1)


def _check_rotary(file: GgufFile, arch_name: str, arch: Architecture, config: dict[str, Any]) -> None:
    head_dim, num_heads, num_kv_heads = (config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    if head_dim == 0 or head_dim % 2 or num_kv_heads == 0 or num_heads % num_kv_heads:
        file.fail(
            f"{num_heads} heads, {num_kv_heads} key-value heads of dimension {head_dim} are no possible attention"
        )
    for key in ("rope.dimension_count", "attention.value_length"):
        if arch.latent or ((arch.rotates_part or not arch.rotates) and key == "rope.dimension_count"):
            continue
        if (value := file.integer(f"{arch_name}.{key}", head_dim)) != head_dim:
            file.fail(f"`{arch_name}.{key}` is {value}, not the head dimension {head_dim}", UNSUPPORTED)
    for key in (arch.eps, "rope_theta"):
        if config[key] <= 0:
            file.fail(f"{key} is {config[key]}, but must be positive")


def _check_unread(file: GgufFile, arch_name: str, arch: Architecture) -> None:
    if not file.flag(f"{arch_name}.attention.causal", True):
        file.fail(f"`{arch_name}.attention.causal` is false: it makes embeddings, and no text", UNSUPPORTED)
    for key in set(_UNREAD).difference(arch.known):
        if value := file.number(f"{arch_name}.{key}", 0.0):
            file.fail(f"`{arch_name}.{key}` is {value}, which is not known of this architecture", UNSUPPORTED)


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
