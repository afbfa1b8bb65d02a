"""AWQ: codes of 4 (or 8) bits, packed along the outputs, with scales and zero points by group of inputs.

Its smoothing is part of the weights already, but for families whose activation is no product (Falcon, MPT, StarCoder):
what comes out of that is divided by `act.scales`, which is done to the columns of the matrix behind it: it is widened.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError, StartError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.quant.config_fields import Fields
from text_generation_inference.quant.groups import (
    InputGroups,
    KeptSlice,
    beside,
    guess_group_size,
    hold,
    read_scale,
    read_typed,
)
from text_generation_inference.quant.integer_fields import (
    NO_RULES,
    WAY_OUT,
    MatrixRules,
    read_bits,
    read_group_size,
    read_names,
)
from text_generation_inference.quant.low_bit import LowBitScheme, StoredLowBit, choose_stored
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Beside, Part, Parts, stack

_PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}  # in a word, of successive outputs
BITS = tuple(_PLACES)
_DIVISORS = ("act.scales", "gelu_impl.scales")  # beside the matrix, of what comes out of an activation


@dataclass(frozen=True, slots=True)
class StoredAwq:
    """What a checkpoint has of a matrix."""

    bits: int = 4
    group_size: int | None = 128  # None: all inputs
    has_zeros: bool = True  # else the middle code stands for 0

    @property
    def per_word(self) -> int:
        return len(_PLACES[self.bits])

    def groups(self, columns: int) -> int:
        return 1 if self.group_size is None else -(-columns // self.group_size)


class Awq(StoredLowBit):
    def __init__(self, stored: StoredAwq) -> None:
        self.stored = stored
        super().__init__(LowBitScheme(stored.bits, stored.group_size, not stored.has_zeros))

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        rows, columns = KeptSlice.of(part).shape
        if rows % self.stored.per_word:
            raise ModelFormatError(
                f"{part.name}: {rows} outputs cannot be in AWQ, which packs {self.stored.per_word} of them"
            )
        return beside(part.name, "qweight"), (columns, rows // self.stored.per_word)

    def declare(self, part: Part) -> dict[str, Beside]:
        rows, columns = KeptSlice.of(part).shape
        groups = self.stored.groups(columns)
        found = {beside(part.name, "scales"): Beside(((groups, rows),))}
        if self.stored.has_zeros:
            found[beside(part.name, "qzeros")] = Beside(((groups, rows // self.stored.per_word),))
        return found

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._wanted(name, KeptSlice.of(part)).values()

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        stored, kept = self.stored, KeptSlice.of(part)
        wanted = self._wanted(name, kept)
        codes = self._codes(read_typed(wanted["qweight"], checkpoint, torch.int32).to(device), kept)
        scale = read_scale(wanted["scales"], checkpoint, device).t()
        zero = None
        if stored.has_zeros:
            zero = self._unpack(read_typed(wanted["qzeros"], checkpoint, torch.int32).to(device), kept)
        size = stored.group_size or kept.shape[1]
        groups = InputGroups(scale, zero, size, kept.columns[0] // size * size)
        return hold(codes, stored.bits, groups, kept.columns, part)

    def _wanted(self, name: str, kept: KeptSlice) -> dict[str, Wanted]:
        packed, size = (1, self.stored.per_word, 1), self.stored.group_size or kept.shape[1]
        found = {
            "qweight": kept.wanted(beside(name, "qweight"), packed, (0, 1, 1)),
            "scales": kept.wanted(beside(name, "scales"), (1, 1, 1), (0, size, 1)),
        }
        if self.stored.has_zeros:
            found["qzeros"] = kept.wanted(beside(name, "qzeros"), packed, (0, size, 1))
        return found

    def _codes(self, words: Tensor, kept: KeptSlice) -> Tensor:
        """As `hold` takes them: of 4 bits two inputs in a byte, without ever having one in a byte of its own."""
        if self.stored.bits != 4 or len(words) % 2:
            return self._unpack(words, kept)
        even, odd = words[0::2], words[1::2]
        pairs = words.new_empty((words.shape[1], len(_PLACES[4]), len(even)), dtype=torch.uint8)
        for place, of_word in enumerate(_PLACES[4]):
            shift = 4 * of_word
            pairs[:, place] = (even >> shift & 15 | (odd >> shift & 15) << 4).to(torch.uint8).t()
        skip = kept.rows[0] % len(_PLACES[4])
        return pairs.flatten(0, 1)[skip : skip + kept.rows[1] - kept.rows[0]]

    def _unpack(self, words: Tensor, kept: KeptSlice) -> Tensor:
        """int32 `[inputs or groups, words along the outputs]` -> uint8 `[rows, inputs or groups]`."""
        places, (first, last) = _PLACES[self.stored.bits], kept.rows
        codes = low_bit.unpack_codes(words.contiguous().view(torch.uint8), self.stored.bits)
        codes = codes.unflatten(1, (-1, len(places)))[..., list(places)].flatten(1)
        skip = first % len(places)
        return codes[:, skip : skip + last - first].t()


class DividedAwq(Method):
    """Widened, and its columns divided by what its inputs should be divided by."""

    def __init__(self, stored: Awq, divisor: str) -> None:
        self._stored = stored
        self._divisor = divisor  # name beside the part

    def _name(self, name: str) -> str:
        return f"{name.removesuffix('.weight').rpartition('.')[0]}.{self._divisor}".removeprefix(".")

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return self._stored.holder(part)

    def declare(self, part: Part) -> dict[str, Beside]:
        columns = KeptSlice.of(part).shape[1]
        return {**self._stored.declare(part), self._name(part.name): Beside(((columns,),))}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._stored.list_reads([(name, part)], checkpoint)
            yield Wanted(self._name(name))

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        def widen(name: str, part: Part) -> Tensor:
            wide = low_bit.widen(self._stored.read_part(name, part, checkpoint, device))
            divisor = read_scale(Wanted(self._name(name)), checkpoint, device)
            if not bool(divisor.all()):
                raise ModelFormatError(f"tensor {self._name(name)} in {checkpoint.folder} holds a divisor that is 0")
            return wide / divisor[slice(*KeptSlice.of(part).columns)].float()

        return stack(parts, widen, dtype, device)


@dataclass(frozen=True, slots=True)
class AwqQuantization(Quantization):
    stored: StoredAwq = StoredAwq()
    method: str = "awq"
    origin: str = "this checkpoint, whose matrices are in AWQ,"
    rules: MatrixRules = NO_RULES
    plain: tuple[str, ...] = ()  # parts of the names of matrices that are not stored so
    has_head: bool = False
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of a checkpoint's tensors; None: there is no checkpoint
    is_guessed: bool = False  # nothing but the tensors themselves tells how they are stored

    @property
    def description(self) -> str:
        size = "each row" if self.stored.group_size is None else f"groups of {self.stored.group_size}"
        how = "" if self.is_guessed else f": {self.stored.bits} bits, {size}"
        return f"matrices in few bits, as the checkpoint has them ({self.method}{how})"

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "AwqQuantization":
        found = next((name for name in stored if name.endswith(".qweight")), None)
        if found is None and self.is_guessed:
            raise StartError(
                "`quantize` awq is for checkpoints in AWQ, which this one is not. Leave it out, or use one that"
                " quantises on loading, such as bitsandbytes-nf4 or fp8."
            )
        if found is None:
            raise ModelFormatError(
                "config.json says that matrices are in AWQ, but there is no tensor whose name ends in .qweight. Does"
                " config.json belong to these weights?"
            )
        return replace(self, shapes=stored)

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        found = [self._find(matrix, part, name) for part, name in zip(matrix.parts, names, strict=True)]
        methods = [None if each is None else Awq(each) for each in found]
        divisor = self._find_divisor(matrix, names)
        if divisor is not None and methods[0] is not None:
            return DividedAwq(methods[0], divisor)
        return choose_stored(matrix, methods)

    def _find_divisor(self, matrix: Matrix, names: Sequence[str]) -> str | None:
        """Beside a matrix with as many inputs: one before the activation has as many outputs instead."""
        if len(matrix.parts) > 1:
            return None
        place, shapes = names[0].rpartition(".")[0], self.shapes or {}
        inputs = KeptSlice.of(matrix.parts[0]).shape[1]
        return next((each for each in _DIVISORS if shapes.get(f"{place}.{each}") == (inputs,)), None)

    def _find(self, matrix: Matrix, part: Part, name: str) -> StoredAwq | None:
        """How a part is stored; None: plainly."""
        changes = self.rules.find(name)
        stored = replace(self.stored, **(changes or {}))
        if self.shapes is None:
            is_plain = changes is None or (not matrix.may_round and not (self.has_head and name.endswith("lm_head")))
            return None if is_plain or any(each in name for each in self.plain) else stored
        if not any(f"{name}.{each}" in self.shapes for each in ("qweight", "scales")):
            return None
        if self.is_guessed:
            size = guess_group_size(name, KeptSlice.of(part).shape[1], self.shapes)
            return StoredAwq(4, size, f"{name}.qzeros" in self.shapes)
        # Those without zero points may have them all the same.
        return replace(stored, has_zeros=stored.has_zeros or f"{name}.qzeros" in self.shapes)


def detect(config: Mapping[str, Any], source: str) -> AwqQuantization:
    """`config` is the section of config.json, or a file beside it."""
    fields = Fields(config, f"{source}: `quantization_config`", WAY_OUT)
    name = next((name for name in ("version", "checkpoint_format", "format") if fields.get(name)), "version")
    if fields.text(name, "gemm").lower() != "gemm":
        raise fields.refuse(name, "gemm")
    if fields.text("backend", "autoawq") == "llm-awq":
        raise fields.refuse("backend", "autoawq")
    bits, size = (old if fields.get(old) is not None else new for old, new in _OLD_NAMES)
    return AwqQuantization(
        StoredAwq(read_bits(fields, bits, *BITS), read_group_size(fields, size), fields.truth("zero_point", True)),
        plain=read_names(fields, "modules_to_not_convert"),
        has_head=fields.truth("lm_head", False),
    )


_OLD_NAMES = (("w_bit", "bits"), ("q_group_size", "group_size"))
UNTOLD = AwqQuantization(origin="`quantize` awq", is_guessed=True)  # and random weights have 4 bits in groups of 128
