"""`LowBit`: matrices in codes of 4 or 8 bits, whatever format a checkpoint has them in.

A format is one file beside this one: a class derived from `StoredLowBit` which names the tensors of a part and reads
this rank's slice of it as a `LowBitWeight` (`read_part`), and a `detect` that makes a `Quantization` of what
config.json says. All that follows (joining parts, packing, multiplying, widening what no op multiplies so) is here.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import Rows
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import (
    PLAIN_TENSORS,
    Beside,
    Module,
    Part,
    Parts,
    Read,
    Storage,
    read_plain,
    stack,
)

_ROWS_AT_A_TIME = 512


@dataclass(frozen=True, slots=True)
class LowBitScheme:
    """What a matrix is like once it is read: how large it is, and what random ones are made with."""

    bits: int = 4  # 4 or 8
    group_size: int | None = 128  # None: all columns of a row
    is_symmetric: bool = True
    table: tuple[float, ...] | None = None
    quantizes_inputs: bool = False
    scale_dtype: torch.dtype = torch.float16
    has_whole_zeros: bool = True  # an offset is a scale times a whole number
    puts_rows_apart: bool = True  # into codes, each by itself

    @property
    def kind(self) -> str:
        """A word of `kernels.low_bit.KINDS`."""
        if self.table is not None:
            return "table"
        return "4 bits with offsets" if self.bits == 4 and not self.has_whole_zeros else f"{self.bits} bits"

    def accepts(self, columns: int) -> bool:
        """Whether matrices with so many columns can be put into such codes."""
        return columns * self.bits % 8 == 0

    def groups(self, columns: int) -> int:
        return -(-columns // (self.group_size or columns))

    def quantize(self, weight: Tensor) -> LowBitWeight:
        """To the nearest codes."""
        table = None if self.table is None else torch.tensor(self.table, device=weight.device)
        made = low_bit.quantize(weight, self.bits, self.group_size or weight.shape[1], self.is_symmetric, table)
        zeros = None if made.offset is None else (made.offset / made.scale).round()
        made.scale = made.scale.to(self.scale_dtype)
        made.offset = None if zeros is None else made.scale.float() * zeros  # of the scale as it is kept
        made.quantizes_inputs = self.quantizes_inputs
        return made

    def bytes(self, rows: int, columns: int) -> int:
        each = self.scale_dtype.itemsize + (0 if self.is_symmetric else torch.float32.itemsize)
        return rows * (columns * self.bits // 8 + self.groups(columns) * each)


def quantize_rows(weight: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> LowBitWeight:
    """8 bits with a scale per row: some rows at a time, so that few of them are ever wide."""
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=weight.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=weight.device)
    for first in range(0, rows, _ROWS_AT_A_TIME):
        some = slice(first, first + _ROWS_AT_A_TIME)
        codes[some], scale[some] = quantize(weight[some])
    return LowBitWeight(codes, scale, None, 8, columns, columns, weight.dtype)


class LowBit(Method):
    """A plain matrix, put into codes when it has been read."""

    num_experts = 1  # of the matrix
    keeps_wide = False  # its values are held beside the codes: see `keep_wide_copies`
    form: tuple[object, ...] = ()  # of the weight, before it is packed
    num_bytes: int | None = None  # of it, once it has been read; before that a checkpoint's scales may be of any type

    def __init__(self, scheme: LowBitScheme) -> None:
        self.scheme = scheme

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield self._to_quantize(part).wanted(name)

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        """This rank's slice of a part as `[out, in]`, its rows in the order that the model wants them in."""
        source = self._to_quantize(part)
        weight = self.scheme.quantize(read_plain(name, source, checkpoint, device))
        if part.dim is not None and (source.start, source.end) != (part.start, part.end):
            take = low_bit.take_rows if part.is_by_row else low_bit.take_columns
            weight = take(weight, part.start - source.start, part.end - source.start)
        return low_bit.change_rows(weight, part.arrange_rows)

    def _to_quantize(self, part: Part) -> Part:
        """All of its matrix, or this rank's slice where that alone decides the scales: codes are those of one rank."""
        size = self.scheme.group_size
        in_groups = size is not None and part.start % size == part.end % size == 0
        is_enough = self.scheme.puts_rows_apart and (part.is_by_row or in_groups)
        return replace(part, arrangement=None) if is_enough else part.unsliced

    def widen_part(
        self, name: str, part: Part, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The same as plain values."""
        weight = self.read_part(name, part, checkpoint, device)
        weight.dtype = dtype
        return low_bit.widen(weight)

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        """Parts are read one after the other: only one is ever held as it was."""
        read = [self.read_part(name, part, checkpoint, device) for name, part in parts]
        for each in read:
            each.dtype = dtype
        if low_bit.can_join(read, self.num_experts):
            joined = low_bit.join(read, self.num_experts)
            self.num_bytes = joined.num_bytes
            return joined
        wide = torch.cat([low_bit.widen(each) for each in read])  # such as queries and keys with orders of their own
        self.num_bytes = wide.nbytes
        return wide

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        made = low_bit.join([self.scheme.quantize(make(name, part)) for name, part in parts])
        made.dtype = dtype
        return made

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        copy_bytes = math.prod(shape) * dtype.itemsize if self.keeps_wide else 0
        held = self.scheme.bytes(shape[0], math.prod(shape[1:])) if self.num_bytes is None else self.num_bytes
        return held + copy_bytes

    def finish(self, matrix: Matrix) -> None:
        weight = matrix.weight
        assert isinstance(weight, LowBitWeight | Tensor)
        if isinstance(weight, LowBitWeight):
            weight.keeps_wide = self.keeps_wide
            self.form = weight.form
        matrix.weight = matrix.pack(weight)

    def apply(self, matrix: Matrix, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return matrix.ops.linear(x, matrix.weight, matrix.bias, x.dtype)

    def kind(self, matrix: Matrix) -> object:
        return (type(matrix.weight), self.form)


@dataclass(frozen=True, slots=True)
class LowBitOnLoading(Quantization):
    """A plain checkpoint whose matrices are put into codes; those that a scheme does not accept stay as they are."""

    method: str
    scheme: LowBitScheme
    description: str  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def origin(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"`quantize` {self.method}"

    @property
    def rounds_plain(self) -> bool:
        return True

    @property
    def width_step(self) -> int:
        return self.scheme.group_size or 1

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        accepted = all(self.scheme.accepts(part.whole_shape[0 if part.transposed else 1]) for part in matrix.parts)
        return LowBit(self.scheme) if matrix.may_round and accepted else None


class StoredLowBit(LowBit):
    """As a checkpoint has it. Two are equal if they read all parts alike."""

    has_groups = True  # successive columns of a row have a scale in common; else a matrix can only be widened

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        raise NotImplementedError


class WidenedLowBit(Method):
    """In few bits, all of it or some parts, and widened to the model's type when it is read."""

    def __init__(self, stored: Mapping[str, LowBit]) -> None:
        self._stored = dict(stored)  # by the part's name; of others there are none: they are plain

    def _of(self, part: Part) -> Storage:
        return self._stored.get(part.name, PLAIN_TENSORS)

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return self._of(part).holder(part)

    def declare(self, part: Part) -> dict[str, Beside]:
        return self._of(part).declare(part)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._of(part).list_reads([(name, part)], checkpoint)

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        def widen(name: str, part: Part) -> Tensor:
            stored = self._stored.get(part.name)
            if stored is None:
                return read_plain(name, part, checkpoint, device)
            return stored.widen_part(name, part, checkpoint, dtype, device)

        return stack(parts, widen, dtype, device)


class MixedLowBit(StoredLowBit):
    """Parts that are stored in different bits or groups, held in those that hold all of them."""

    def __init__(self, stored: Mapping[str, StoredLowBit]) -> None:
        schemes = [each.scheme for each in stored.values()]
        sizes = [scheme.group_size for scheme in schemes if scheme.group_size is not None]
        super().__init__(
            LowBitScheme(
                bits=max(scheme.bits for scheme in schemes),
                group_size=math.gcd(*sizes) if sizes else None,
                is_symmetric=all(scheme.is_symmetric for scheme in schemes),
            )
        )
        self._stored = dict(stored)  # by the part's name

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        return self._stored[part.name].holder(part)

    def declare(self, part: Part) -> dict[str, Beside]:
        return self._stored[part.name].declare(part)

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield from self._stored[part.name].list_reads([(name, part)], checkpoint)

    def read_part(self, name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> LowBitWeight:
        weight = self._stored[part.name].read_part(name, part, checkpoint, device)
        return weight if weight.bits == self.scheme.bits else low_bit.to_8_bits(weight)


def keep_wide_copies(model: Module, dtype: torch.dtype, room: int) -> None:
    """Have the values of all matrices in few bits held beside their codes, if ops have a use for them and they take no
    more than `room`."""
    held = [
        (matrix, matrix.method)
        for _, matrix in model.walk()
        if isinstance(matrix, Matrix)
        and isinstance(matrix.method, LowBit)
        and matrix.ops.low_bit_keeps_wide
        and not matrix.is_stacked
        and not matrix.method.scheme.quantizes_inputs
    ]
    if sum(math.prod(matrix.shape) for matrix, _ in held) * dtype.itemsize <= room:
        for _, method in held:
            method.keeps_wide = True


def wide_copy_bytes(model: Module, dtype: torch.dtype) -> int:
    """What such copies take."""
    matrices = (module for _, module in model.walk() if isinstance(module, Matrix))
    kept = (each for each in matrices if isinstance(each.method, LowBit) and each.method.keeps_wide)
    return sum(math.prod(each.shape) for each in kept) * dtype.itemsize


def as_held(method: Method, matrix: Matrix) -> Method:
    """The same, or what it becomes where the op that multiplies the matrix takes no few bits."""
    if not isinstance(method, LowBit):
        return method
    ops = matrix.ops
    if ("experts" if matrix.is_stacked else "linear") in ops.low_bit_ops and method.scheme.kind in ops.low_bit_kinds:
        return method
    return WidenedLowBit({part.name: method for part in matrix.parts})


def choose_stored(matrix: Matrix, stored: Sequence[StoredLowBit | None]) -> Method | None:
    """For a matrix whose parts are stored so; None: plainly."""
    by_name = {part.name: each for part, each in zip(matrix.parts, stored, strict=True) if each is not None}
    if not by_name:
        return None
    if not matrix.may_round or not all(each is not None and each.has_groups for each in stored):
        return WidenedLowBit(by_name)
    first = next(iter(by_name.values()))
    if any(each != first for each in stored):
        if any(each.scheme.table or each.scheme.quantizes_inputs for each in by_name.values()):
            return WidenedLowBit(by_name)
        first = MixedLowBit(by_name)
    first = copy(first)
    first.num_experts = matrix.num_experts
    return first
