"""Attention over runs of rows by the kernels that come with torch: flash attention takes runs of any lengths at once.

Long runs of one length go through `scaled_dot_product_attention` instead, whose kernel is 1.3 to 1.6 times as fast for
them on an H200 (and slower for short ones). It plans each new shape for 5 to 20 ms on the host: shapes of long runs are
those of pictures or tiles, which come again.
"""

from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels import segments as definition
from text_generation_inference.kernels.segments import Segments

_MOST_DIM, _STEP = 256, 8  # of a head
_LONG = 256  # rows of a run
_flash: Any = torch.ops.aten._flash_attention_forward  # pyright: ignore


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """q `[rows, heads, dim]`, k and v `[key rows, kv heads, dim]` -> `[rows, heads * dim]`."""
    if not takes(q) or is_long(segments):
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


def is_long(segments: Segments) -> bool:
    """Whether all runs have one length, which is large."""
    return segments.are_alike and segments.longest[0] >= _LONG
