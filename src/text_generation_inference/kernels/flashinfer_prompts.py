# pyright: basic, reportMissingImports=false
"""Attention of prompts through flashinfer, for those who have installed it and ask for it (`ATTENTION=flashinfer`).

On a Hopper card its kernel for prompts without tokens before them is faster than ours
(`bench/cuda_attention.py --flashinfer`), but it is compiled for about two minutes when it is first used on a machine.
It plans each batch on the host: three plans take turns, so that none is overwritten while the device may still copy it.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import StartError
from text_generation_inference.kernels.batch import Batch, PagedMeta

_ROOM_BYTES = 128 << 20
_PLANS = 3
_LEAST_TOKENS = 1024  # fewer are done before a plan has been made


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def is_for(batch: Batch, tokens: int, least: int = _LEAST_TOKENS) -> bool:
    """Whether all prompts of the batch, which has so many tokens, are whole, and long enough together."""
    meta: PagedMeta = batch.meta
    prompts = tokens - meta.num_decode
    return prompts >= least and not any(meta.chunk_starts_cpu) and sum(meta.chunk_ends_cpu) == prompts


class FlashinferPrompts:
    def __init__(self, device: torch.device) -> None:
        import flashinfer

        room = torch.empty(_ROOM_BYTES, dtype=torch.uint8, device=device)
        make = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        self._plans: list[tuple[Any, torch.cuda.Event]] = [
            (make(room, "NHD"), torch.cuda.Event()) for _ in range(_PLANS)
        ]
        self._next = 0
        self._planned: tuple[Batch, object] | None = None
        self._works = False

    def __call__(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim], this step's own as the cache holds them
        v: Tensor,
        batch: Batch,
        out: Tensor,  # [tokens, heads * head_dim]
        scale: float,
    ) -> bool:
        """Fill `out` for the prompts of the batch; False: this batch is not one for it."""
        first, (tokens, heads, d) = batch.meta.num_decode, q.shape
        if not is_for(batch, tokens):
            return False
        if q.dtype not in (torch.bfloat16, torch.float16) or d not in (64, 128, 256):
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        how = (heads, k.shape[1], d, q.dtype, scale)
        if self._planned is None or self._planned[0] is not batch or self._planned[1] != how:
            self._plan(batch.meta.chunk_ends_cpu, how)
            self._planned = (batch, how)
        wrapper, _ = self._plans[self._next]
        wrapper.run(q[first:], k[first:], v[first:], out=out[first:].view(-1, heads, d))
        return True

    def _plan(self, lengths: list[int], how: tuple[int, int, int, torch.dtype, float]) -> None:
        self._next = (self._next + 1) % _PLANS
        wrapper, copied = self._plans[self._next]
        copied.synchronize()
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        heads, kv_heads, d, dtype, scale = how
        try:
            wrapper.plan(starts, starts, heads, kv_heads, d, causal=True, sm_scale=scale, q_data_type=dtype)
        except Exception as error:
            if self._works:
                raise
            raise StartError(
                f"`attention` flashinfer could not be made ready ({type(error).__name__}: {str(error)[:300]})."
                " Without it the Triton kernels run, which need nothing installed."
            ) from error
        copied.record()
        self._works = True
