"""Attention over latents with the native CPU kernels: absorbed, for rows that decode and for prompts."""

import ctypes

import torch
from torch import Tensor

from text_generation_inference.kernels import latent as definition
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.cpu.ops import MAX_HEAD_DIM, NativeOps

_FEW_TOKENS = 16  # more go through the library's products of heads


class NativeLatentAttention:
    """Overrides for a device's `ops`, as `NativeOps` has them."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops
        library = ops.library
        self._cache, self._absorb = library.tgi_latent_cache, library.tgi_absorb
        self._attend, self._expand = library.tgi_latent_attention, library.tgi_expand_values

    def latent_attention(
        self,
        q: Tensor,  # [tokens, heads, p + r]
        latent: Tensor,  # [tokens, c + r]
        up: Tensor,  # [heads, p + v, c]
        norm: tuple[Tensor, float],  # weight [c] and epsilon
        cos_sin: Tensor,  # [positions, r] float32: cosines, then sines
        batch: Batch,
        cache: Tensor,
        scale: float,
    ) -> Tensor:
        """-> `[tokens, heads * v]`; q and latent are changed."""
        if not _takes(q, latent, up, norm[0], cos_sin, batch, cache):
            return definition.latent_attention(q, latent, up, norm, cos_sin, batch, cache, scale)
        meta: PagedMeta = batch.meta
        threads, tokens, heads = self._ops.num_threads, q.shape[0], q.shape[1]
        blocks, block_size, _, width = cache.shape
        c, r = up.shape[2], cos_sin.shape[1]
        p, (q_token, q_head, _) = q.shape[2] - r, q.stride()
        v, up_head = up.shape[1] - p, up.stride(0)
        weight, eps = norm
        if self._cache(
            q.data_ptr() + 4 * p, q_token, q_head, latent.data_ptr(), latent.stride(0), weight.data_ptr(), eps,
            cos_sin.data_ptr(), cos_sin.shape[0], batch.positions.data_ptr(), batch.kv_index.data_ptr(),
            blocks * block_size, cache.data_ptr(), tokens, heads, c, r, threads,
        ):  # fmt: skip
            raise IndexError("a token's position or cache index is out of range")
        if tokens > _FEW_TOKENS:
            absorbed = definition.absorb(q, up[:, :p])
        else:
            absorbed, sizes = torch.empty((tokens, heads, width)), (tokens, heads, p, c, r)
            self._absorb(q.data_ptr(), q_token, q_head, up.data_ptr(), up_head, *sizes, absorbed.data_ptr(), threads)
        mixed = torch.empty((tokens, heads, c))
        tables, num_chunks, starts, ends = meta.block_tables, len(meta.chunk_starts_cpu), None, None
        if num_chunks:
            starts = (ctypes.c_int64 * num_chunks)(*meta.chunk_starts_cpu)
            ends = (ctypes.c_int64 * num_chunks)(*meta.chunk_ends_cpu)
        if self._attend(
            absorbed.data_ptr(), cache.data_ptr(), blocks, block_size, tables.data_ptr(), tables.stride(0),
            tables.shape[1], batch.seq_lens.data_ptr(), meta.num_decode, num_chunks, starts, ends, heads, c, r, scale,
            mixed.data_ptr(), threads,
        ):  # fmt: skip
            raise IndexError("a row's block table does not cover its tokens with blocks of the cache")
        if tokens > _FEW_TOKENS:
            return definition.expand_values(mixed, up[:, p:])
        out = torch.empty((tokens, heads * v))
        rows = up.data_ptr() + 4 * p * c
        self._expand(mixed.data_ptr(), rows, up_head, tokens, heads, v, c, out.data_ptr(), threads)
        return out


def _takes(q: Tensor, latent: Tensor, up: Tensor, weight: Tensor, cos_sin: Tensor, batch: Batch, cache: Tensor) -> bool:
    """Whether the kernels are for this."""
    meta = batch.meta
    if not isinstance(meta, PagedMeta) or meta.table_rows is not None:
        return False
    floats = (q, latent, up, weight, cos_sin, cache)
    whole = (up, weight, cos_sin, cache, batch.positions, batch.kv_index, batch.seq_lens)
    return (
        all(each.dtype is torch.float32 for each in floats)
        and all(each.is_contiguous() for each in whole)
        and q.stride(2) == latent.stride(1) == meta.block_tables.stride(1) == 1
        and meta.block_tables.dtype is batch.seq_lens.dtype is torch.int32
        and up.shape[2] % 8 == cache.shape[3] % 8 == 0
        and cache.shape[3] <= MAX_HEAD_DIM
    )
