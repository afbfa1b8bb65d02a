"""GPTQ: codes of 2, 3, 4 or 8 bits, packed along the inputs, with scales and zero points by group of inputs.

Which matrices are stored so is told by the names that a checkpoint has; config.json says how. Files without a word in
config.json (those of TGI's own `quantize`) are told by the shapes of their tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant import awq, marlin
from text_generation_inference.quant.config_fields import Fields, NamePattern
from text_generation_inference.quant.groups import (
    InputGroups,
    KeptSlice,
    beside,
    guess_group_size,
    held_bits,
    hold,
    read_index,
    read_scale,
    read_typed,
)
from text_generation_inference.quant.integer_fields import (
    NO_RULES,
    WAY_OUT,
    Changes,
    MatrixRules,
    read_bits,
    read_group_size,
    read_names,
)
from text_generation_inference.quant.low_bit import LowBitScheme, StoredLowBit, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts

BITS = (2, 3, 4, 8)
_WORD = 32
_OF_TGI = "gptq_bits"  # a tensor of files that TGI's `quantize` wrote


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint has of a matrix."""

    bits: int = 4
    group_size: int | None = 128  # None: all inputs
    is_symmetric: bool = True  # zero points are the middle code, whatever is stored: some writers say v1 and mean v2
    has_index: bool = False  # `desc_act`: which inputs are in a group is listed
    zero_less: int = 1  # stored zero points are less by this (v1), or not (v2)
    leaves_bias: bool = False  # there is a bias that the model does not have: nothing but zeros

    @property
    def run(self) -> tuple[int, int]:
        """So many codes, and the words that they fill."""
        return (_WORD, 3) if self.bits == 3 else (_WORD // self.bits, 1)

    def words(self, codes: int) -> int:
        per_run, words = self.run
        return -(-codes // per_run) * words

    def groups(self, columns: int) -> int:
        return 1 if self.group_size is None else -(-columns // self.group_size)


class Gptq(StoredLowBit):
    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        held = held_bits(stored.bits, 0)
        super().__init__(LowBitScheme(held, stored.group_size, stored.is_symmetric))

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        rows, columns = KeptSlice.of(part).shape
        return beside(part.name, "qweight"), (self.stored.words(columns), rows)

    def declare(self, part: Part) -> dict[str, Beside]:
        stored, (rows, columns) = self.stored, KeptSlice.of(part).shape
        groups = stored.groups(columns)
        found = {
            "scales": Beside(((groups, rows),)),
            "qzeros": Beside(((groups, stored.words(rows)),), needed=not stored.is_symmetric),
            "g_idx": Beside(((columns,),), needed=stored.has_index),
        }
        if stored.leaves_bias:
            found["bias"] = Beside(((rows,),), needed=False)
        return {beside(part.name, name): each for name, each in found.items()}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            if self._has_index(name, checkpoint):
                yield Wanted(beside(name, "g_idx"), on_host=True)
            yield from self._wanted(name, KeptSlice.of(part), needs_all=self.stored.has_index).values()

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        stored, kept = self.stored, KeptSlice.of(part)
        index = self._read_index(name, kept, checkpoint)
        wanted = self._wanted(name, kept, needs_all=index is not None)
        words = read_typed(wanted["qweight"], checkpoint, torch.int32).to(device)
        codes = self._codes(words, kept)
        scale = read_scale(wanted["scales"], checkpoint, device).t()
        zero = None
        if "qzeros" in wanted:
            zero = self._zeros(read_typed(wanted["qzeros"], checkpoint, torch.int32).to(device), kept)
        if stored.leaves_bias and beside(name, "bias") in checkpoint:
            _check_bias(beside(name, "bias"), checkpoint)
        size, first = stored.group_size or kept.shape[1], 0
        if index is not None:
            index = index[slice(*kept.columns)]
        elif kept.is_by_column:
            first = kept.columns[0] // size * size
        return hold(codes, stored.bits, InputGroups(scale, zero, size, first, index), kept.columns, part)

    def _wanted(self, name: str, kept: KeptSlice, needs_all: bool) -> dict[str, Wanted]:
        """What is read of each tensor. Inputs that are listed may be in any group: `needs_all`."""
        stored, (codes, words) = self.stored, self.stored.run
        size = stored.group_size or kept.shape[1]
        by_group = replace(kept, columns=(0, kept.shape[1])) if needs_all else kept
        found = {
            "qweight": kept.wanted(beside(name, "qweight"), (1, 1, 1), (0, codes, words)),
            "scales": by_group.wanted(beside(name, "scales"), (1, 1, 1), (0, size, 1)),
        }
        if not stored.is_symmetric:
            found["qzeros"] = by_group.wanted(beside(name, "qzeros"), (1, codes, words), (0, size, 1))
        return found

    def _codes(self, words: Tensor, kept: KeptSlice) -> Tensor:
        """int32 `[words along the inputs, rows]` -> as `hold` takes them."""
        bits, (first, last) = self.stored.bits, kept.columns
        skip, count = first % self.stored.run[0], last - first
        data = words.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)  # also of a single word
        if bits == 8 or (bits == 4 and count % 2 == 0 and skip % 2 == 0):
            return data[:, skip * bits // 8 : (skip + count) * bits // 8]
        return unpack(data, bits)[:, skip : skip + count]

    def _zeros(self, words: Tensor, kept: KeptSlice) -> Tensor:
        """int32 `[groups, words along the outputs]` -> uint8 `[rows, groups]`."""
        stored, (first, last) = self.stored, kept.rows
        skip, count = first % stored.run[0], last - first
        if stored.bits != 3 and stored.zero_less:  # as it was taken off, borrowing from the code before
            ones = sum(1 << shift for shift in range(0, _WORD, stored.bits))
            words = words + (ones - (1 << _WORD) if ones >> (_WORD - 1) else ones)
        codes = unpack(words.contiguous().view(torch.uint8), stored.bits)[:, skip : skip + count].t()
        return codes + 1 & 7 if stored.bits == 3 and stored.zero_less else codes

    def _has_index(self, name: str, checkpoint: Checkpoint) -> bool:
        has_groups = self.stored.group_size is not None
        return has_groups and beside(name, "g_idx") in checkpoint

    def _read_index(self, name: str, kept: KeptSlice, checkpoint: Checkpoint) -> Tensor | None:
        """The group of each input of the whole matrix; None: they come one after the other."""
        if not self._has_index(name, checkpoint):
            return None
        size = self.stored.group_size or kept.shape[1]
        index = read_index(beside(name, "g_idx"), self.stored.groups(kept.shape[1]), checkpoint)
        if not bool(index.any()) or bool((index == torch.arange(kept.shape[1]) // size).all()):
            return None  # nothing but zeros was never written
        return index


def unpack(data: Tensor, bits: int) -> Tensor:
    """uint8 `[rows, bytes]`, a stream of codes from the lowest bit of each on -> uint8 `[rows, codes]`."""
    if bits == 8:
        return data
    if bits == 3:
        wide = data.unflatten(1, (-1, 3)).int()
        wide = wide[..., 0] | wide[..., 1] << 8 | wide[..., 2] << 16
        return torch.stack([wide >> shift & 7 for shift in range(0, 24, 3)], -1).flatten(1).to(torch.uint8)
    return torch.stack([data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(1)


def _check_bias(name: str, checkpoint: Checkpoint) -> None:
    if bool(checkpoint.read(name, on_host=True).any()):
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} is a bias that this architecture does not have. Is `architectures`"
            " in config.json right?"
        )


# -- which matrices ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GptqQuantization(Quantization):
    stored: Stored = Stored()
    method: str = "gptq"
    origin: str = "this checkpoint, whose matrices are in GPTQ,"
    may_leave: tuple[str, ...] = ("gptq_*",)
    rules: MatrixRules = NO_RULES
    only: tuple[str, ...] = ()  # parts of the names of all that are stored so; none: all
    plain: tuple[str, ...] = ()  # parts of the names of those that are not
    has_head: bool = False
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of a checkpoint's tensors; None: there is no checkpoint
    is_guessed: bool = False  # nothing but the tensors themselves tells how they are stored

    @property
    def description(self) -> str:
        kind = "symmetric" if self.stored.is_symmetric else "with zero points"
        size = "each row" if self.stored.group_size is None else f"groups of {self.stored.group_size}"
        how = "" if self.is_guessed else f": {self.stored.bits} bits, {size}, {kind}"
        return f"matrices in few bits, as the checkpoint has them ({self.method}{how})"

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> Quantization:
        if self.is_guessed and _is_awq(stored):
            return awq.UNTOLD.named_as_in(stored)
        if not any(name.endswith(".qweight") for name in stored):
            if self.is_guessed:
                raise StartError(
                    "`quantize` gptq is for checkpoints in GPTQ or AWQ, which this one is not. Leave it out, or use one"
                    " that quantises on loading, such as bitsandbytes-nf4 or fp8."
                )
            raise ModelFormatError(
                "config.json says that matrices are in GPTQ, but there is no tensor whose name ends in .qweight. Does"
                " config.json belong to these weights?"
            )
        return replace(self, shapes=stored, is_guessed=self.is_guessed or _OF_TGI in stored)

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        found = [self._find(matrix, part, name) for part, name in zip(matrix.parts, names, strict=True)]
        leaves_bias = not matrix.bias_parts and any(f"{name}.bias" in (self.shapes or {}) for name in names)
        return choose_stored(
            matrix, [None if each is None else Gptq(replace(each, leaves_bias=leaves_bias)) for each in found]
        )

    def _find(self, matrix: Matrix, part: Part, name: str) -> Stored | None:
        """How a part is stored; None: plainly."""
        if self.shapes is None:
            is_plain = not matrix.may_round and not (self.has_head and name.endswith("lm_head"))
            return None if is_plain or self._is_plain(name) else self.rule(name)
        if not any(f"{name}.{each}" in self.shapes for each in ("qweight", "scales")):
            return None
        stored = self.rule(name) or self.stored
        return _guess(stored, name, part, self.shapes) if self.is_guessed else stored

    def _is_plain(self, name: str) -> bool:
        if any(each in name for each in self.plain):
            return True
        return bool(self.only) and not any(each in name for each in self.only)

    def rule(self, name: str) -> Stored | None:
        """What the rules say of it; None: it is plain."""
        changes = self.rules.find(name)
        return None if changes is None else replace(self.stored, **changes)


def _is_awq(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether codes are packed along the outputs, not along the inputs."""
    name = next((name.removesuffix("qweight") for name in shapes if name.endswith(".qweight")), "")
    words, scales = shapes.get(f"{name}qweight"), shapes.get(f"{name}scales")
    return words is not None and scales is not None and len(words) == len(scales) == 2 and words[1] < scales[1]


def _guess(stored: Stored, name: str, part: Part, shapes: Mapping[str, tuple[int, ...]]) -> Stored:
    """Bits and groups from shapes; zero points are read, whatever they are."""
    columns, words = KeptSlice.of(part).shape[1], (shapes.get(f"{name}.qweight") or (0,))[0]
    bits = next((each for each in BITS if Stored(each).words(columns) == words), None)
    if bits is None:
        raise ModelFormatError(
            f"tensor {name}.qweight has {words} rows, which are no codes of 2, 3, 4 or 8 bits for {columns} inputs"
        )
    size = guess_group_size(name, columns, shapes)
    return replace(stored, bits=bits, group_size=size, is_symmetric=False, has_index=False)


# -- what config.json says ---------------------------------------------------------------------------------------------


def detect(config: Mapping[str, Any], source: str) -> Quantization:
    """`config` is the section of config.json."""
    fields = Fields(config, f"{source}: `quantization_config`", WAY_OUT)
    form = fields.text("checkpoint_format", "") or fields.text("format", "") or "gptq"
    if form == "marlin" or fields.truth("is_marlin_format", False):
        return marlin.detect(config, source)
    if form not in ("gptq", "gptq_v2"):
        raise fields.refuse(
            "checkpoint_format" if fields.get("checkpoint_format") else "format", "gptq, gptq_v2, marlin"
        )
    if fields.text("pack_dtype", "int32").removeprefix("torch.") != "int32":
        raise fields.refuse("pack_dtype", "int32")
    stored = Stored(
        read_bits(fields, "bits", *BITS),
        read_group_size(fields, "group_size"),
        fields.truth("sym", False),
        fields.truth("desc_act", False),
        zero_less=int(form == "gptq"),
    )
    return GptqQuantization(
        stored,
        rules=_read_rules(fields),
        only=read_names(fields, "modules_in_block_to_quantize"),
        plain=read_names(fields, "modules_to_not_convert"),
        has_head=fields.truth("lm_head", False),
    )


def _read_rules(fields: Fields) -> MatrixRules:
    if not fields.get("dynamic"):
        return NO_RULES
    dynamic = fields.below("dynamic")
    found: list[tuple[NamePattern, Changes]] = []
    for name in dynamic.value:
        expression: str = name.removeprefix("-:").removeprefix("+:")
        pattern = NamePattern(name, f"{fields.place}: `dynamic`", fields.work, expression)
        if name.startswith("-:"):
            found.append((pattern, None))
            continue
        rule = dynamic.below(name)
        changes: dict[str, Any] = {}
        if rule.get("bits") is not None:
            changes["bits"] = read_bits(rule, "bits", *BITS)
        if rule.get("group_size") is not None:
            changes["group_size"] = read_group_size(rule, "group_size")
        if rule.get("sym") is not None:
            changes["is_symmetric"] = rule.truth("sym", True)
        if rule.get("desc_act") is not None:
            changes["has_index"] = rule.truth("desc_act", False)
        found.append((pattern, changes))
    return MatrixRules(by_pattern=tuple(found))


UNTOLD = GptqQuantization(origin="`quantize` gptq", is_guessed=True)  # and random weights have 4 bits in groups of 128
