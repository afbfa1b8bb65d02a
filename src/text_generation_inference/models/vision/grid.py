"""Patches of pictures of any grid: in which order they lie, and how they are rotated by row and column."""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_inference.models.config import Config
from text_generation_inference.models.vision.blocks import Rotation

Sides = Sequence[tuple[int, int]]  # rows and columns of patches, of each picture


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


def rotation_of(places: Tensor, of_rows: Tensor, of_columns: Tensor) -> Rotation:
    """By frequencies: angles of the row, then of the column; both again for the other half of a head."""
    rows, columns = places.float().unbind(1)
    angles = torch.cat((rows[:, None] * of_rows, columns[:, None] * of_columns), dim=1).repeat(1, 2)
    return angles.cos(), angles.sin()


def frequencies_of(theta: float, dim: int, device: torch.device) -> Tensor:
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / theta**steps


def read_theta(config: Config) -> float:
    """Of the rotation inside a tower, in old files and new ones."""
    return config.inner("rope_parameters").positive("rope_theta", config.positive("rope_theta", 10000.0))
