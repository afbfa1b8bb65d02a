"""Ranks that share one model: how dimensions are split, and how results come together.

One `Parallel` per process. With one rank every call is free. Parts need not be equal: every number of ranks up to that
of attention heads has something to do (`models.ranks` says which numbers a model takes).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.matrices import Rows
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.parallel.collectives import Collectives, TorchCollectives

_TORCH = TorchCollectives()
_TILES, _SMALL = (128, 64, 32, 16), (8, 4, 2, 1)  # what parts of a width are multiples of; of few columns these
_LARGEST_EXCESS = 1.05  # of the largest part over the mean

Range = tuple[int, int]  # from, and up to


@dataclass(frozen=True, slots=True)
class Parallel:
    rank: int = 0
    world: int = 1
    collectives: Collectives = _TORCH
    by_expert: bool = False  # ranks have whole experts, rather than a part of the width of each

    def split(self, size: int, unit: int = 1) -> Range:
        """This rank's range of a dimension, of which `unit` stay together; the first ranks may have one unit more."""
        units, more = divmod(size // unit, self.world)
        start = self.rank * units + min(self.rank, more)
        return start * unit, (start + units + (self.rank < more)) * unit

    def split_width(self, width: int, step: int = 1) -> Range:
        """This rank's range of a width, cut at multiples of `step` where there are enough of them."""
        return self.split(width, find_unit(width, self.world, step))

    def split_heads(self, num_heads: int, num_kv_heads: int) -> tuple[Range, Range]:
        """This rank's queries, and the key/value heads that they read, all of them equally often.

        A rank has whole groups of queries; or, with fewer key/value heads than ranks, one key/value head, which the
        ranks that share its queries all have.
        """
        queries = num_heads // num_kv_heads  # of a group
        if num_kv_heads >= self.world:
            first, last = self.split(num_kv_heads)
            return (first * queries, last * queries), (first, last)
        sharing, more = divmod(self.world, num_kv_heads)  # ranks of a head; the first heads have one more
        bound = more * (sharing + 1)
        if self.rank < bound:
            head, place, sharing = self.rank // (sharing + 1), self.rank % (sharing + 1), sharing + 1
        else:
            head, place = more + (self.rank - bound) // sharing, (self.rank - bound) % sharing
        first, last = Parallel(place, sharing).split(queries)
        return (head * queries + first, head * queries + last), (head, head + 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.collectives.all_reduce(x) if self.world > 1 else x

    def all_reduce_add_rms_norm(
        self, ops: Ops, x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        """`ops.add_rms_norm` of the sum over ranks: (normalised, new residual)."""
        if self.world == 1:
            return ops.add_rms_norm(x, residual, weight, eps, quantize_for)
        return self.collectives.all_reduce_add_rms_norm(ops, x, residual, weight, eps, quantize_for)

    def all_gather_last(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over ranks."""
        if self.world == 1:
            return x
        return torch.cat(self.collectives.all_gather(x), dim=-1)


def find_unit(width: int, world: int, step: int = 1) -> int:
    """What parts of a width are multiples of, such that every rank has one: of `step` if that can be.

    Kernels have tiles of 128 and want rows that begin at whole 16; a part that is larger than the others is what all
    wait for. So it is the first of the sizes above that makes no part much larger, or the last.
    """
    if width % step or width // step < world:
        step = 1
    units = [math.lcm(step, each) for each in (*_TILES, *_SMALL)]
    whole = [unit for unit in units if width % unit == 0 and width // unit >= world] or [1]
    large = [unit for unit in whole if unit >= _TILES[-1]]
    even = (unit for unit in large if -(-(width // unit) // world) * unit * world <= _LARGEST_EXCESS * width)
    return next(even, large[-1] if large else whole[0])


SINGLE = Parallel()
