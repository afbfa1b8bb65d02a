"""How a model says which checkpoint tensors it is made of.

A `Module` declares its own tensors by name, relative to its parent, and which slice of each belongs to this
rank. The loader walks modules, reads slices and sets attributes; a module never reads files.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted


class Arrangement(ABC):
    """The order in which a model wants the rows of what was read, or the choice it makes among them."""

    def count(self, rows: int) -> int:
        """How many are left of so many."""
        return rows

    def stays_within(self, size: int) -> bool:
        """Whether no row leaves its run of `size` rows, which may have something in common."""
        return False

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """x `[rows, ...]` -> `[count(rows), ...]`. Whatever comes by rows: values, biases, scales, blocks."""


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of one checkpoint tensor."""

    name: str  # relative to the module's parent
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int | None = None  # dimension to slice; None: all of it
    start: int = 0
    end: int = 0
    transposed: bool = False  # stored `[in, out]`: turned round once the slice has been read
    arrangement: Arrangement | None = None  # of the rows that were read
    random_std: float = 0.02  # of the numbers that take its place where there is no checkpoint
    number: int | None = None  # of several in one tensor, one after the other: `dim` is a dimension of this one
    inside: tuple[int, int] | None = None  # of several in one tensor, one below the other: where in `dim` this one is

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Before it is sliced."""
        return self.shape if self.number is None else self.shape[1:]

    @property
    def local_shape(self) -> tuple[int, ...]:
        sizes = list(self.whole_shape)
        if self.dim is not None:
            sizes[self.dim] = self.end - self.start
        if self.transposed:
            sizes.reverse()
        if self.arrangement is not None:
            sizes[0] = self.arrangement.count(sizes[0])
        return tuple(sizes)

    @property
    def unsliced(self) -> "Part":
        """All of the matrix that it is a slice of, as it is stored."""
        if self.inside is not None:
            return replace(self, start=self.inside[0], end=self.inside[1], arrangement=None)
        return replace(self, dim=None, start=0, end=0, arrangement=None)

    def take_from(self, whole: Tensor) -> Tensor:
        """Its slice of what was made of `unsliced`: of a matrix `[out, in]`, or of a number for each row of it."""
        if self.dim is None:
            return whole
        before = 0 if self.inside is None else self.inside[0]
        kept = slice(self.start - before, self.end - before)
        if self.is_by_row:
            return whole[kept]
        return whole if whole.dim() == 1 else whole[:, kept]

    @property
    def is_by_row(self) -> bool:
        """Of a matrix `[out, in]`: outputs are sliced, whichever way round it is stored."""
        return self.dim is not None and self.dim == int(self.transposed)

    def arrange(self, read: Tensor) -> Tensor:
        """What was read, as the model wants it."""
        if self.transposed:
            read = read.t().contiguous()
        return read if self.arrangement is None else self.arrangement.apply(read)

    def arrange_rows(self, read: Tensor) -> Tensor:
        """The same for what is stored beside the values of each row, or in place of them."""
        return read if self.arrangement is None else self.arrangement.apply(read)

    def wanted(self, name: str) -> Wanted:
        """This slice of the tensor `name`."""
        if self.dim is None:
            return Wanted(name, number=self.number)
        return Wanted(name, self.dim, self.start, self.end, number=self.number)


Parts = list[tuple[str, Part]]  # with the names that a checkpoint has for them
Read = Callable[[str, Part], Tensor]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """A tensor that a checkpoint has beside a part, such as its scales."""

    shapes: Shapes  # that it may have
    needed: bool = True


class Storage:
    """How a declared tensor is stored: here a plain tensor for each part. Matrices have methods of `quant`."""

    holds_fp8 = False  # reading it rounds to FP8 or widens them, which not every device does in full

    def holder(self, part: Part) -> tuple[str, tuple[int, ...]]:
        """The tensor that holds a part in a checkpoint: name relative to the module's parent, and shape."""
        return part.name, part.shape

    def declare(self, part: Part) -> dict[str, Beside]:
        """What a checkpoint has beside a part, by name relative to the module's parent."""
        return {}

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        """What `read` asks the checkpoint for, in its order."""
        for name, part in parts:
            yield part.wanted(name)

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        """The parts stacked along the first dimension."""
        return stack(parts, lambda name, part: read_plain(name, part, checkpoint, device), dtype, device)

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        """The same from plain parts that `make` makes up."""
        if len(parts) == 1:
            return make(*parts[0])
        first = make(*parts[0])
        return stack(parts, lambda name, part: first if part is parts[0][1] else make(name, part), dtype, first.device)

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """On the device."""
        return math.prod(shape) * dtype.itemsize


PLAIN_TENSORS = Storage()


class Float32Tensors(Storage):
    """Kept in float32 whatever the model's type, with something added: what checkpoints store as w for 1 + w."""

    def __init__(self, plus: float = 0.0) -> None:
        self.plus = plus

    def read(self, parts: Parts, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
        value: Tensor = super().read(parts, checkpoint, torch.float32, device)
        return value + self.plus if self.plus else value

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        return super().make(parts, make, dtype).float()

    def bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return super().bytes(shape, torch.float32)


def stack(parts: Parts, read: Read, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Parts as one tensor; they are read one after the other: never all of them beside their sum."""
    if len(parts) == 1:
        return read(*parts[0]).to(device=device, dtype=dtype)
    rows, first = sum(part.local_shape[0] for _, part in parts), 0
    value = torch.empty((rows, *parts[0][1].local_shape[1:]), dtype=dtype, device=device)
    for name, part in parts:
        tensor = read(name, part).to(device)
        value[first : first + tensor.shape[0]] = tensor
        first += tensor.shape[0]
    return value


def read_plain(name: str, part: Part, checkpoint: Checkpoint, device: torch.device) -> Tensor:
    """A part in the type that it is stored in, which must be one that stands for numbers by itself."""
    stored = checkpoint.dtype(name)
    if stored is torch.float8_e4m3fn:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} is stored in FP8, but config.json does not say that it is"
            " quantised. Does config.json belong to these weights?"
        )
    if not stored.is_floating_point or stored.itemsize < 2:
        raise ModelFormatError(
            f"tensor {name} in {checkpoint.folder} has type {str(stored).removeprefix('torch.')}. Use a version of the"
            " model in bfloat16, float16, float32 or FP8 (e4m3)."
        )
    return part.arrange(checkpoint.read(*part.wanted(name)).to(device))


@dataclass(frozen=True, slots=True)
class Declared:
    """One tensor of a module: its parts stacked along the first dimension."""

    attribute: str
    parts: list[Part]
    storage: Storage = PLAIN_TENSORS

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [part.local_shape for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def named(self, prefix: str) -> Parts:
        """Its parts with the names that a checkpoint has for them."""
        return [(prefix + part.name, part) for part in self.parts]


@dataclass(frozen=True, slots=True)
class Number:
    """A single number above 0 that a checkpoint may have; the attribute has its value where it does not."""

    attribute: str
    names: tuple[str, ...]  # relative to the module's parent; the first that is there counts
    needed: bool = False
    is_known: bool = False  # the attribute has it already, whatever the checkpoint says


class Module:
    """A node of a model. `name` prefixes the tensor names of everything below it."""

    name: str = ""
    elsewhere: Collection[str] = ()  # what other ranks have beside what this one declares: tensors below these names

    def declare(self) -> list[Declared]:
        """The tensors this module itself holds."""
        return []

    def declare_numbers(self) -> list[Number]:
        """Numbers that a checkpoint may have for this module."""
        return []

    def finish(self) -> None:
        """Called once after this module's tensors are set."""

    def children(self) -> Iterator["Module"]:
        for value in vars(self).values():
            if isinstance(value, Module):
                yield value
            elif isinstance(value, list):
                yield from (item for item in value if isinstance(item, Module))

    def walk(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        """(prefix of its parent's tensors, module) for this module and everything below it."""
        yield prefix, self
        below = f"{prefix}{self.name}." if self.name else prefix
        for child in self.children():
            yield from child.walk(below)
