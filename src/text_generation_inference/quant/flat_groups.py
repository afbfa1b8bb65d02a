"""Groups that run over all values of a matrix, one row after the other, whatever the length of its rows.

A row holds groups of columns that have a scale in common as long as the greatest divisor of both lengths is.
"""

from math import gcd

import torch
from torch import Tensor

from text_generation_inference.quant.groups import KeptSlice

MIN_GROUP = 32  # columns; matrices that have scales for fewer are better held as they are


def group_of(columns: int, block: int) -> int:
    """Columns of a row that have a scale in common, where blocks may begin in one row and end in the next."""
    return gcd(columns, block)


def scales_by_row(scale: Tensor, block: int, kept: KeptSlice) -> Tensor:
    """`[blocks]` of the whole matrix -> `[rows, groups]` of the rows that are kept."""
    columns = kept.shape[1]
    group = group_of(columns, block)
    first, last = (row * columns for row in kept.rows)
    return scale[torch.arange(first, last, group) // block].view(-1, columns // group)
