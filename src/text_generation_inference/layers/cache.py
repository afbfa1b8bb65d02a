"""What a layer keeps of every token it has seen. Allocation, bytes per token and limits follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TOKEN_ID_BYTES = 4

Shapes = tuple[tuple[int, int], ...]  # heads and dimensions of what each tensor holds of a token


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Paged keys and values: this rank's heads. What is kept otherwise is a spec of its own."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # tokens further back are not read

    @property
    def shapes(self) -> Shapes:
        return ((self.num_kv_heads, self.head_dim),) * 2

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LatentCacheSpec:
    """Paged latents, from which heads make their keys and values, beside the rotated key that all of them share.

    One tensor, and the same on every rank.
    """

    latent_dim: int
    rope_dim: int
    dtype: torch.dtype
    window: int | None = None  # tokens further back are not read

    @property
    def shapes(self) -> Shapes:
        return ((1, self.latent_dim + self.rope_dim),)

    @property
    def bytes_per_token(self) -> int:
        return (self.latent_dim + self.rope_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CrossCacheSpec:
    """Paged keys and values of pictures, for layers of cross-attention: this rank's heads. Their blocks are a pool of
    their own, for what is kept follows from a request's pictures, whatever its tokens are."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shapes(self) -> Shapes:
        return ((self.num_kv_heads, self.head_dim),) * 2

    @property
    def bytes_per_row(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        return 0

    @property
    def window(self) -> None:
        return None


AnyCacheSpec = CacheSpec | LatentCacheSpec | CrossCacheSpec


def common_window(caches: Sequence[AnyCacheSpec]) -> int | None:
    """How many tokens are read at most, if all layers read a window only. What is behind it need not be kept."""
    windows = [cache.window for cache in caches if not isinstance(cache, CrossCacheSpec)]
    return None if None in windows else max((window for window in windows if window is not None), default=None)


def partial_window(caches: Sequence[AnyCacheSpec]) -> int | None:
    """How many tokens are read at most by the layers that read a window, where others read all."""
    if common_window(caches) is not None:
        return None
    return max((cache.window for cache in caches if cache.window is not None), default=None)


def window_bytes_per_token(caches: Sequence[AnyCacheSpec]) -> int:
    """Of the layers that read a window."""
    return sum(cache.bytes_per_token for cache in caches if cache.window is not None)


def bytes_per_token(caches: Sequence[AnyCacheSpec]) -> int:
    """Of all layers, and of the token's id, which is kept in the same blocks."""
    return TOKEN_ID_BYTES + sum(cache.bytes_per_token for cache in caches)


def bytes_per_picture_row(caches: Sequence[AnyCacheSpec]) -> int:
    """Of all layers of cross-attention; 0 where there are none."""
    return sum(cache.bytes_per_row for cache in caches if isinstance(cache, CrossCacheSpec))
