"""Ranks that share one model: how dimensions are split, and how results come together.

One `Parallel` per process. With one rank every call is free.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from text_generation_inference.errors import StartError


@dataclass(frozen=True, slots=True)
class Parallel:
    rank: int = 0
    world: int = 1

    def split(self, size: int, what: str) -> tuple[int, int]:
        """This rank's half-open range of a dimension that must divide evenly."""
        if size % self.world:
            raise StartError(
                f"{what} ({size}) cannot be split over {self.world} ranks: choose a number that divides it"
            )
        part = size // self.world
        return self.rank * part, (self.rank + 1) * part

    def split_kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """Like `split`, but with fewer heads than ranks each rank keeps a copy of the one it needs."""
        if num_kv_heads >= self.world:
            return self.split(num_kv_heads, "the number of key/value heads")
        if self.world % num_kv_heads:
            raise StartError(f"{num_kv_heads} key/value heads cannot be shared by {self.world} ranks")
        head = self.rank * num_kv_heads // self.world
        return head, head + 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        if self.world > 1:
            dist.all_reduce(x)  # pyright: ignore[reportUnknownMemberType]
        return x

    def all_gather_last(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over ranks."""
        if self.world == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x.contiguous())  # pyright: ignore[reportUnknownMemberType]
        return torch.cat(parts, dim=-1)


SINGLE = Parallel()
