"""The forms that a matrix has on a device, and what goes into its product and comes out: the types of ops.

A matrix is a plain tensor, one in FP8 or in codes of few bits, or packed: in a form that
the ops of one device have made and they alone read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Rows, Fp8Weight, ScaledRows
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.partial_sum import PartialSum


class PackedWeight:
    """A matrix `[out, in]` in a form of one device. A form is a class derived from this one."""

    __slots__ = ()
    shape: torch.Size


@dataclass(slots=True)
class BlockPieces(PackedWeight):
    """Quantised blocks as a file has them, before `Ops.pack_blocks`: rows of one kind after those of another."""

    pieces: Sequence[tuple[str, Tensor]]  # kind, [rows, bytes per row] uint8
    shape: torch.Size  # of the matrix


Weight: TypeAlias = Tensor | Fp8Weight | LowBitWeight | PackedWeight
Rows: TypeAlias = Tensor | Fp8Rows  # what goes into a matrix
# What comes out; its scales, or the sum over ranks, perhaps left to the op that comes next.
Product: TypeAlias = Tensor | ScaledRows | PartialSum


def plain(weight: Weight) -> Tensor:
    """Of a matrix that must be a plain tensor here."""
    assert isinstance(weight, Tensor), f"{type(weight).__name__} is not a plain matrix"
    return weight
