"""Attention over runs of rows by the flash attention that comes with torch: one kernel, whatever lengths runs have.

Not by `scaled_dot_product_attention`: that takes runs of one length alone, and may choose a library that plans each new
shape for longer than the attention takes.
"""

from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels import segments as definition
from text_generation_inference.kernels.segments import Segments

_MOST_DIM, _STEP = 256, 8  # of a head
_flash: Any = torch.ops.aten._flash_attention_forward  # pyright: ignore


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """q `[rows, heads, dim]`, k and v `[key rows, kv heads, dim]` -> `[rows, heads * dim]`."""
    if not takes(q):
        return definition.segment_attention(q, k, v, segments)
    starts, key_starts = segments.starts
    out = _flash(
        q, k, v, starts, key_starts, *segments.longest,
        0.0, False, False,  # no dropout, not causal, no mask for debugging
    )[0]  # fmt: skip
    return out.flatten(1)


def takes(q: Tensor) -> bool:
    dim = q.shape[-1]
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dim <= _MOST_DIM and dim % _STEP == 0
