"""Patches of pictures of any grid: in which order they lie, and how they are rotated by row and column."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from text_generation_inference.models.config import Config

Sides = Sequence[tuple[int, int]]  # rows and columns of patches, of each picture
T = TypeVar("T")
_KEPT_PATCHES = 1 << 17


class ByGrid(Generic[T]):
    """What is the same for all pictures of a grid, on the device: kept for those that were seen last.

    Making it takes longer than a block of a tower, and bringing it there waits for all that the device has to do.
    """

    def __init__(self, make: Callable[[int, int, torch.device], T]) -> None:
        self._make = make
        self._kept: OrderedDict[tuple[int, int, torch.device], T] = OrderedDict()
        self._num_patches = 0

    def __call__(self, rows: int, columns: int, device: torch.device) -> T:
        key = (rows, columns, device)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        with torch.inference_mode(False), torch.no_grad():  # whoever asks first
            made = self._kept[key] = self._make(*key)
        self._num_patches += rows * columns
        while self._num_patches > _KEPT_PATCHES and len(self._kept) > 1:
            (rows, columns, _), _ = self._kept.popitem(last=False)
            self._num_patches -= rows * columns
        return made


def by_block(x: Tensor, merge: int) -> Tensor:
    """`[rows, columns, ...]` -> `[rows * columns, ...]`, squares of `merge` by `merge` after each other."""
    rows, columns = x.shape[:2]
    x = x.unflatten(1, (columns // merge, merge)).unflatten(0, (rows // merge, merge))
    return x.transpose(1, 2).flatten(0, 3)


def places_of(sides: Sides, merge: int) -> Tensor:
    """Row and column of the patches of all pictures, in the order of `by_block`: `[patches, 2]`."""
    pairs = (torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in sides)
    shaped = (each.view(rows, columns, 2) for each, (rows, columns) in zip(pairs, sides, strict=True))
    return torch.cat([by_block(each, merge) for each in shaped])


def rotation_of(places: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """By frequencies: angles of the row, then of the column, for both halves of a head. Their cosines, then sines."""
    rows, columns = places.float().unbind(1)
    angles = torch.cat((rows[:, None] * of_rows, columns[:, None] * of_columns), dim=1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def frequencies_of(theta: float, dim: int, device: torch.device) -> Tensor:
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / theta**steps


def read_theta(config: Config) -> float:
    """Of the rotation inside a tower, in old files and new ones."""
    inner = config.inner("rope_parameters")
    return (config if inner.get("rope_theta") is None else inner).positive("rope_theta", 10000.0)
