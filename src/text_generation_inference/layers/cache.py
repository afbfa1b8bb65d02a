"""`CacheSpec`: what a layer keeps of every token it has seen. Allocation, bytes per token and limits follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Paged keys and values: this rank's heads. What is kept otherwise is a spec of its own."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # tokens further back are not read

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def bytes_per_token(caches: Sequence[CacheSpec]) -> int:
    """Of all layers, and of the token's id, which is kept in the same blocks."""
    return TOKEN_ID_BYTES + sum(cache.bytes_per_token for cache in caches)
