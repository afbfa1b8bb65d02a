"""`PaddedTower`: a tower whose passes can be padded to a few sizes, for devices that make one graph for each shape.

A picture is cut into *pieces*: tiles of one size, parts of any size, or the moments of a video (a still picture is
one). What a pass reads of a piece are rows of a few tensors; those of its pieces follow each other, and zeros fill them
up to the pass's size.
Padding changes nothing: tiles are computed by themselves, and rows of patches that are zeros are seen by none.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.models.vision.blocks import scales_of
from text_generation_inference.models.vision.tower import Parts, Tower, run_parts

Piece = list[Tensor]  # on the host, all with as many rows
_STEPS = (4, 5, 6, 8)  # of sizes: three for each doubling
_KEPT_ORDERS = 64


class PaddedTower(Tower):
    unit: str  # what sizes count, for people
    step: int = 1  # all sizes are multiples of it
    least: int = 1  # the smallest
    shares_passes: bool  # several pieces may be in one pass

    @abstractmethod
    def sizes_of(self, shape: Sequence[int], grid: Sequence[int]) -> list[int]:
        """Of the pieces of a picture whose pixels have this shape."""

    @abstractmethod
    def num_rows(self, size: int) -> int:
        """Of what comes out for a piece, or a pass, of this size."""

    @abstractmethod
    def pieces_of(self, pixels: Tensor, grid: Sequence[int]) -> list[Piece]:
        """pixels: uint8 on the host."""

    @abstractmethod
    def blank(self) -> Piece:
        """One of no rows."""

    @abstractmethod
    def run(self, *tensors: Tensor) -> Tensor:
        """A pass, from tensors on the device alone: `num_rows(size)` rows `[rows, width]`, and after them one that is
        the same in every pass, for what a family puts between features."""

    @abstractmethod
    def order_of(self, shape: Sequence[int], grid: Sequence[int]) -> np.ndarray:
        """Which rows of its pieces, one after the other, are a picture's features; -1: the row behind them all."""

    def get_ready(self, device: torch.device) -> None:
        """Put constants on the device: there is no way from the host into a graph."""
        scales_of(self.normalisation, torch.empty(0, device=device).device)  # with its number, as pixels have it


def pass_sizes(tower: PaddedTower, most: int) -> list[int]:
    """From the smallest to the first that holds `most`."""
    sizes: list[int] = []
    count, last = -(-tower.least // tower.step), -(-most // tower.step)
    while True:
        sizes.append(count * tower.step)
        if count >= last:
            return sizes
        count = _next_count(count)


def _next_count(count: int) -> int:
    """1, 2, 3, 4, 5, 6, 8, 10, 12, 16 ..."""
    if count < _STEPS[0]:
        return count + 1
    factor = 1
    while True:
        for step in _STEPS:
            if step * factor > count:
                return step * factor
        factor *= 2


class TileTower(PaddedTower):
    """Pictures are tiles of one size, `[tiles, height, width, 3]`, each computed by itself."""

    unit = "tiles"
    shares_passes = True
    num_each: int  # features of a tile
    tile_shape: tuple[int, ...]  # of its pixels

    def look_at(self, shape: Sequence[int]) -> None:
        self.tile_shape = tuple(shape[1:])

    @abstractmethod
    def see(self, tiles: Tensor) -> Parts[Tensor]:
        """uint8 `[tiles, height, width, 3]` -> `[tiles * num_each, width]`."""

    @property
    def between(self) -> Tensor | None:
        """`[width]`, which stands between features; None: nothing does."""
        return None

    def lay_out(
        self, shapes: Sequence[tuple[int, ...]], grids: Sequence[tuple[int, ...]], device: torch.device
    ) -> list[Tensor]:
        """The order of each picture's features, where anything stands between them."""
        if self.between is None:
            return []
        return [self._order_on(device, tuple(shape), tuple(grid)) for shape, grid in zip(shapes, grids, strict=True)]

    def in_parts(
        self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: list[Tensor] | None = None
    ) -> Parts[list[Tensor]]:
        features = yield from self.see(torch.cat(list(pixels)))
        num_each = features.shape[0] // sum(map(len, pixels))
        each = features.split([len(picture) * num_each for picture in pixels])
        if (between := self.between) is None:
            return list(each)
        orders = layout or self.lay_out([tuple(picture.shape) for picture in pixels], grids, features.device)
        both = zip(each, orders, strict=True)
        return [torch.cat((rows, between[None]))[order] for rows, order in both]

    @cached_property
    def _order_on(self) -> Callable[[torch.device, tuple[int, ...], tuple[int, ...]], Tensor]:
        """`order_of` on the device, kept for the arrangements of tiles that were seen last."""

        def make(device: torch.device, shape: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
            with torch.inference_mode(False):  # whoever asks first
                return torch.from_numpy(self.order_of(shape, grid)).to(device)  # pyright: ignore

        return lru_cache(_KEPT_ORDERS)(make)

    def sizes_of(self, shape: Sequence[int], grid: Sequence[int]) -> list[int]:
        return [1] * shape[0]

    def num_rows(self, size: int) -> int:
        return size * self.num_each

    def pieces_of(self, pixels: Tensor, grid: Sequence[int]) -> list[Piece]:
        return [[tile] for tile in pixels.split(1)]

    def blank(self) -> Piece:
        return [torch.zeros((0, *self.tile_shape), dtype=torch.uint8)]

    def run(self, *tensors: Tensor) -> Tensor:
        rows = run_parts(self.see(tensors[0]))
        between = rows.new_zeros(rows.shape[1]) if self.between is None else self.between
        return torch.cat((rows, between[None]))

    def order_of(self, shape: Sequence[int], grid: Sequence[int]) -> np.ndarray:
        return np.arange(shape[0] * self.num_each)
