# pyright: basic, reportMissingImports=false
"""Rotation of queries and keys that go into no cache, both in one kernel, where they are."""

import triton
import triton.language as tl
from torch import Tensor

_MOST_HEADS = 16  # of a program


@triton.jit
def _turn(at, head, half, cos, sin, COUNT: tl.constexpr, HALF: tl.constexpr):
    """Heads whose first values are `at`."""
    mask = (head < COUNT)[:, None] & (half < HALF)[None, :]
    first_at, second_at = at + half[None, :], at + HALF + half[None, :]
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_at, (first * cos - second * sin).to(at.dtype.element_ty), mask=mask)
    tl.store(second_at, (second * cos + first * sin).to(at.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_heads_kernel(
    q, k, cos_sin, q_row, q_head, k_row, k_head, turn_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """HB heads of one row: queries first, then keys."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_PARTS: tl.constexpr = (HEADS + HB - 1) // HB
    half = tl.arange(0, HALF_PAD)
    turn = cos_sin + row * turn_row + half
    cos = tl.load(turn, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(turn + HALF, mask=half < HALF, other=0.0)[None, :]
    if part < Q_PARTS:
        head = part * HB + tl.arange(0, HB)
        _turn(q + row * q_row + head[:, None] * q_head, head, half, cos, sin, HEADS, HALF)
    else:
        kv_head = (part - Q_PARTS) * HB + tl.arange(0, HB)
        _turn(k + row * k_row + kv_head[:, None] * k_head, kv_head, half, cos, sin, KV_HEADS, HALF)


def rotate_heads(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Halves of q and k `[rows, heads, dim]` rotated where they are; cos_sin `[rows, rotated]` float32."""
    rows, heads, _ = q.shape
    kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    if rows:
        hb = min(_MOST_HEADS, triton.next_power_of_2(max(heads, kv_heads)))
        _rotate_heads_kernel[(rows, triton.cdiv(heads, hb) + triton.cdiv(kv_heads, hb))](
            q, k, cos_sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, HALF=half, HALF_PAD=triton.next_power_of_2(half), HB=hb, num_warps=4,
        )  # fmt: skip
    return q, k
