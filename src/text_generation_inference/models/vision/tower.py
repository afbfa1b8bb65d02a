"""`Tower`: pixels to features that stand in the place of token embeddings."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Module

T = TypeVar("T")
Parts = Generator[None, None, T]  # work that can be left after each part of it, and what it comes to


class Tower(Module, ABC):
    """Declared by checkpoint names as all modules are, whole on every rank, in few bits where its checkpoint is."""

    width: int  # of features: that of the decoder's stream, `1 + num_levels` times
    num_levels: int = 0  # parts of a feature that are added behind the decoder's first layers, one behind each
    normalisation: Normalisation = Normalisation()  # the family's `PictureRule` has the one of the model's files
    ignored: tuple[str, ...] = ()  # patterns of checkpoint tensors that it does not need

    num_parts: int = 1  # that `in_parts` has: blocks, as a rule

    def encode(self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Features `[num_features, width]` of each picture, in the decoder's type.

        pixels: uint8 on the device, of the shape that the family's `PictureRule` gives them; the tower normalises.
        Several pictures are computed together where their shapes allow it, with the values they would have alone.
        """
        return run_parts(self.in_parts(pixels, grids))

    def in_parts(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: Any = None
    ) -> Parts[list[Tensor]]:
        """`encode`, left after each of `num_parts` parts, so that others' work can go in between.

        A tower has one of the two, and the other follows from it. `layout`: of `lay_out`, if it was asked for.
        """
        yield
        return self.encode(pixels, grids)

    def lay_out(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> Any | None:
        """All that a pass over pictures of these shapes reads beside pixels and weights, on the device: with that it
        takes nothing from the host and can be captured, by who keeps the layout for as long. None: it cannot."""
        return None

    def look_at(self, shape: Sequence[int]) -> None:
        """The pixels of some picture have this shape."""

    @abstractmethod
    def adapt(self, names: Collection[str]) -> None:
        """A checkpoint has tensors of these names: settle which of the names that a family has had are meant."""


def run_parts(parts: Parts[T]) -> T:
    """All that are left."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def settle(module: Module, spellings: Sequence[str], names: Collection[str]) -> None:
    """Name a module as a checkpoint with these tensors does: the spelling under which most of what it declares is."""
    present = set(names)

    def count(spelling: str) -> int:
        module.name = spelling
        declared = ((prefix, each) for prefix, below in module.walk() for each in below.declare())
        return sum(prefix + part.name in present for prefix, each in declared for part in each.parts)

    module.name = max(spellings, key=count)
