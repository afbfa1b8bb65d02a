"""How a model says which checkpoint tensors it is made of.

A `Module` declares its own tensors by name, relative to its parent, and which slice of each belongs to this
rank. The loader walks modules, reads slices and sets attributes; a module never reads files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of one checkpoint tensor."""

    name: str  # relative to the module's parent
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int | None = None  # dimension to slice; None: all of it
    start: int = 0
    end: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        sizes = list(self.shape)
        sizes[self.dim] = self.end - self.start
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Declared:
    """One tensor of a module: its parts stacked along the first dimension."""

    attribute: str
    parts: list[Part]
    keep_float32: bool = False
    packable: bool = False  # may arrive as quantised blocks instead, see `Module.accepts_blocks`
    quantizable: bool = False  # may arrive as an `Fp8Weight` instead
    delicate: bool = False  # rounding costs most here: stays as it is where it is not stored in FP8 already

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [part.local_shape for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True, slots=True)
class Number:
    """A single number above 0 that a checkpoint may have; the attribute has its value where it does not."""

    attribute: str
    names: tuple[str, ...]  # relative to the module's parent; the first that is there counts


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix kept in quantised blocks, exactly as its checkpoint stores it."""

    kind: str  # ggml type in small letters, such as "q4_1"
    data: Tensor  # [rows, bytes per row] uint8
    shape: tuple[int, int] = field(default=(0, 0))


class Module:
    """A node of a model. `name` prefixes the tensor names of everything below it."""

    name: str = ""

    def declare(self) -> list[Declared]:
        """The tensors this module itself holds."""
        return []

    def declare_numbers(self) -> list[Number]:
        """Numbers that a checkpoint may have for this module."""
        return []

    def accepts_blocks(self, kind: str) -> bool:
        """Whether `finish` can use a tensor that is `Blocks` of this kind."""
        return False

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
