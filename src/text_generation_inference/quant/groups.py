"""Codes whose inputs have scales, and perhaps zero points, in common by groups: from what is stored to `LowBitWeight`.

A group is a run of successive inputs, or those that an index lists (act-order, `desc_act`): then columns are sorted
once, here, so that no kernel meets an index. A rank that keeps some inputs of such a matrix has groups of uneven size:
each is filled up with columns that are exactly 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
from text_generation_inference.weights.declare import Part

SCALES = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)
_STEP = 16  # columns of the smallest group that kernels take
_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # that a group may have, where only a number of groups is known


@dataclass(frozen=True, slots=True)
class KeptSlice:
    """Which outputs and inputs of a part this rank keeps, whichever way round a plain checkpoint would store it."""

    shape: tuple[int, int]  # outputs, inputs of all of it
    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of(cls, part: Part) -> "KeptSlice":
        if part.number is not None:
            raise ModelFormatError(
                f"{part.name}: its experts lie in one tensor, which is not read in few bits. Use a version of the model"
                " with a tensor for each expert, or an unquantised one."
            )
        kept = [(0, size) for size in part.shape]
        if part.dim is not None:
            kept[part.dim] = (part.start, part.end)
        outputs, inputs = (1, 0) if part.transposed else (0, 1)
        return cls((part.shape[outputs], part.shape[inputs]), kept[outputs], kept[inputs])

    @property
    def is_by_row(self) -> bool:
        return self.rows != (0, self.shape[0])

    @property
    def is_by_column(self) -> bool:
        return self.columns != (0, self.shape[1])

    def wanted(self, name: str, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> Wanted:
        """What covers this rank's slice of a tensor.

        Of outputs (`rows`) and inputs: the dimension of the tensor that they are, and that so many take so many of it.
        """
        for (first, last), kept, (dim, per, elements) in (
            (self.rows, self.is_by_row, rows),
            (self.columns, self.is_by_column, columns),
        ):
            if kept:
                return Wanted(name, dim, first // per * elements, -(-last // per) * elements)
        return Wanted(name)


@dataclass(slots=True)
class InputGroups:
    """What is stored beside codes: by row and group."""

    scale: Tensor  # [rows, groups]
    zero: Tensor | None  # uint8 [rows, groups]: the code that stands for 0; None: the middle one of them
    size: int  # inputs of a group
    first: int = 0  # the input that the first group begins with
    index: Tensor | None = None  # [columns] on the host: which group each of this rank's columns is in


def held_bits(bits: int, columns: int) -> int:
    return 4 if bits <= 4 and columns % 2 == 0 else 8


def hold(codes: Tensor, bits: int, groups: InputGroups, columns: tuple[int, int], part: Part) -> LowBitWeight:
    """codes uint8 `[rows, columns]` of this rank, or already two in a byte as `LowBitWeight` has them."""
    count, device = columns[1] - columns[0], codes.device
    held, middle = held_bits(bits, count), 1 << (bits - 1)
    zero, center = groups.zero, 1 << (held - 1)
    is_packed = codes.shape[1] != count
    if zero is None and middle != center:
        codes = codes + (center - middle)  # never two in a byte
    sorted_by = _sort_columns(groups, columns)
    chosen = sorted_by.groups.to(device)
    if sorted_by.take is not None:
        codes = low_bit.unpack_codes(codes, 4) if is_packed else codes
        codes, is_packed = codes.gather(1, sorted_by.take.to(device).expand(len(codes), -1)), False
        if sorted_by.is_filling is not None:
            zeros = center if zero is None else zero[:, chosen.repeat_interleave(sorted_by.size)]
            codes = torch.where(sorted_by.is_filling.to(device), zeros, codes).to(torch.uint8)
    offset = None
    if zero is not None:
        offset = part.arrange_rows((groups.scale.float() * (zero.float() - center))[:, chosen]).contiguous()
    return LowBitWeight(
        codes=part.arrange_rows(codes if is_packed else low_bit.pack_codes(codes, held)).contiguous(),
        scale=part.arrange_rows(groups.scale[:, chosen]).contiguous(),
        offset=offset,
        bits=held,
        group_size=sorted_by.size,
        in_features=count,
        order=None if sorted_by.take is None else sorted_by.take.to(device, torch.int32),
    )


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Columns one group after the other; all on the host."""

    size: int
    groups: Tensor  # that each run of `size` columns is of
    take: Tensor | None = None  # [held columns]: the column that comes there; None: as they come
    is_filling: Tensor | None = None  # [held columns] bool: it is there for its place alone


def _sort_columns(groups: InputGroups, columns: tuple[int, int]) -> _Sorted:
    first, last = (column - groups.first for column in columns)
    size, index = groups.size, groups.index
    if index is None:
        if last <= size:
            return _Sorted(last - first, torch.zeros(1, dtype=torch.long))
        held = gcd(size, first)
        if held == size or held >= _STEP:
            return _Sorted(held, torch.arange(first, last, held) // size)
        index = torch.arange(first, last) // size
    order = index.argsort(stable=True)
    found, counts = index[order].unique_consecutive(return_counts=True)
    largest = int(counts[0])
    if len(found) == 1 or (largest % _STEP == 0 and bool((counts[:-1] == largest).all()) and counts[-1] <= largest):
        as_they_come = bool((order == torch.arange(len(order))).all())
        return _Sorted(largest, found, None if as_they_come else order)
    filled = -(-counts // _STEP) * _STEP
    begins, held = (sizes.cumsum(0) - sizes for sizes in (counts, filled))
    place = torch.arange(int(filled.sum())) - held.repeat_interleave(filled)
    counts, begins = counts.repeat_interleave(filled), begins.repeat_interleave(filled)
    take = order[begins + torch.minimum(place, counts - 1)]
    return _Sorted(_STEP, found.repeat_interleave(filled // _STEP), take, place >= counts)


# -- tensors of a checkpoint -------------------------------------------------------------------------------------------


def beside(name: str, tensor: str) -> str:
    """The name of a tensor of a matrix, from that of its weight."""
    return f"{name.removesuffix('weight')}{tensor}"


def guess_group_size(
    name: str, columns: int, shapes: Mapping[str, tuple[int, ...]], scales: str = "scales"
) -> int | None:
    """From the shape of the scales of a matrix with so many inputs; None: all inputs are one group."""
    shape = shapes.get(f"{name}.{scales}") or (0,)
    if shape[0] == 1:
        return None
    sizes = (columns // shape[0], *_SIZES) if shape[0] and columns % shape[0] == 0 else _SIZES
    size = next((each for each in sizes if each and -(-columns // each) == shape[0]), None)
    if size is None:
        raise ModelFormatError(f"tensor {name}.{scales} has {shape[0]} rows, which are no groups of {columns} inputs")
    return size


def read_typed(wanted: Wanted, checkpoint: Checkpoint, *allowed: torch.dtype) -> Tensor:
    """Raises `ModelFormatError` naming a tensor of any other type."""
    stored = checkpoint.dtype(wanted.name)
    if stored not in allowed:
        expected = " or ".join(str(each).removeprefix("torch.") for each in allowed)
        raise ModelFormatError(
            f"tensor {wanted.name} in {checkpoint.folder} has type {str(stored).removeprefix('torch.')}, config.json"
            f" makes it {expected}. Does config.json belong to these weights?"
        )
    return checkpoint.read(*wanted)


def read_scale(wanted: Wanted, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    scale = read_typed(wanted, checkpoint, *SCALES).to(device)
    if not bool(torch.isfinite(scale).all()):
        raise ModelFormatError(f"tensor {wanted.name} in {checkpoint.folder} holds a scale that is not finite")
    return scale


def read_index(name: str, count: int, checkpoint: Checkpoint) -> Tensor:
    """The group of each input, one of `count`."""
    index = read_typed(Wanted(name, on_host=True), checkpoint, *INDICES).long()
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} names groups from {int(index.min())} to {int(index.max())}, there"
            f" are {count}"
        )
    return index
