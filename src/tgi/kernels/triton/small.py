# pyright: basic, reportMissingImports=false
"""What happens between the matrix products of a layer: norms, gates, rotation with the write into the cache.

Level 1. Each kernel reads and writes every byte once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.kernels.batch import ForwardBatch


@triton.jit
def _norm_kernel(
    x, residual, weight, out, total, eps, x_row, residual_row, WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    mask = i < WIDTH
    value = tl.load(x + row * x_row + i, mask=mask, other=0.0)
    if ADD:
        value = (
            value.to(tl.float32) + tl.load(residual + row * residual_row + i, mask=mask, other=0.0).to(tl.float32)
        ).to(out.dtype.element_ty)
        tl.store(total + row * WIDTH + i, value, mask=mask)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = wide.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, scaled.to(out.dtype.element_ty), mask=mask)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if rows:
        pad = triton.next_power_of_2(width)
        _norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, out, total, eps, x.stride(0),
            0 if residual is None else residual.stride(0), WIDTH=width, PAD=pad, ADD=residual is not None,
            num_warps=min(16, max(1, pad // 512)),
        )  # fmt: skip
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[tokens, hidden]`."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual, then normalise: (normalised, new residual)."""
    return _norm(x, residual, weight, eps)


@triton.jit
def _gate_kernel(x, out, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < WIDTH
    gate = tl.load(x + row * x_row + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * (1 - 1 / (tl.exp(2 * inner) + 1))
    else:
        gate = gate / (1 + tl.exp(-gate))
    value = gate.to(out.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * WIDTH + i, value.to(out.dtype.element_ty), mask=mask)


def _gate(x: Tensor, gelu: bool) -> Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = min(2048, triton.next_power_of_2(width))
        _gate_kernel[(triton.cdiv(width, block), rows)](
            x, out, x.stride(0), WIDTH=width, BLOCK=block, GELU=gelu, num_warps=max(1, block // 256)
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up `[tokens, 2 * width]` -> silu(gate) * up `[tokens, width]`."""
    return _gate(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gate_up `[tokens, 2 * width]` -> gelu(gate, tanh form) * up `[tokens, width]`."""
    return _gate(gate_up, gelu=True)


@triton.jit
def _rotary_kernel(
    q, k, v, cos_sin, positions, kv_index, k_cache, v_cache, q_token, q_head, k_token, k_head, v_token, v_head,
    ck_block, ck_token, ck_head, cv_block, cv_token, cv_head,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """HB heads of one token: queries are rotated where they are, keys on their way to the cache; values only move."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_PARTS: tl.constexpr = (HEADS + HB - 1) // HB
    K_PARTS: tl.constexpr = (KV_HEADS + HB - 1) // HB
    index = tl.load(kv_index + token)
    block, inside = index // BLOCK_SIZE, index % BLOCK_SIZE
    if part < Q_PARTS + K_PARTS:
        half = tl.arange(0, HALF_PAD)
        turn = cos_sin + tl.load(positions + token) * (2 * HALF) + half
        cos = tl.load(turn, mask=half < HALF, other=0.0)[None, :]
        sin = tl.load(turn + HALF, mask=half < HALF, other=0.0)[None, :]
        if part < Q_PARTS:
            head = part * HB + tl.arange(0, HB)
            mask = (head < HEADS)[:, None] & (half < HALF)[None, :]
            at = q + token * q_token + head[:, None] * q_head + half[None, :]
            first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, (first * cos - second * sin).to(q.dtype.element_ty), mask=mask)
            tl.store(at + HALF, (second * cos + first * sin).to(q.dtype.element_ty), mask=mask)
        else:
            head = (part - Q_PARTS) * HB + tl.arange(0, HB)
            mask = (head < KV_HEADS)[:, None] & (half < HALF)[None, :]
            source = k + token * k_token + head[:, None] * k_head
            to = k_cache + block * ck_block + inside * ck_token + head[:, None] * ck_head
            first = tl.load(source + half[None, :], mask=mask, other=0.0).to(tl.float32)
            second = tl.load(source + HALF + half[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(to + half[None, :], (first * cos - second * sin).to(k_cache.dtype.element_ty), mask=mask)
            tl.store(to + HALF + half[None, :], (second * cos + first * sin).to(k_cache.dtype.element_ty), mask=mask)
            if D > 2 * HALF:
                d = tl.arange(0, D_PAD)
                rest = (head < KV_HEADS)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
                value = tl.load(source + d[None, :], mask=rest, other=0.0)
                tl.store(to + d[None, :], value.to(k_cache.dtype.element_ty), mask=rest)
    else:
        # Names of their own: a name has one shape in both branches.
        v_head_index = (part - Q_PARTS - K_PARTS) * HB + tl.arange(0, HB)
        v_d = tl.arange(0, D_PAD)
        v_mask = (v_head_index < KV_HEADS)[:, None] & (v_d < D)[None, :]
        v_value = tl.load(v + token * v_token + v_head_index[:, None] * v_head + v_d[None, :], mask=v_mask, other=0.0)
        v_to = v_cache + block * cv_block + inside * cv_token + v_head_index[:, None] * cv_head + v_d[None, :]
        tl.store(v_to, v_value.to(v_cache.dtype.element_ty), mask=v_mask)


def rotary_and_cache(
    q: Tensor,  # [tokens, heads, head_dim]; changed in place
    k: Tensor,  # [tokens, kv_heads, head_dim]
    v: Tensor,  # [tokens, kv_heads, head_dim]
    cos_sin: Tensor,  # [positions, rotary_dim] float32: cosines, then sines
    batch: ForwardBatch,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Rotate q and k by position, write k and v into the cache; return the rotated q."""
    tokens, heads, d = q.shape
    kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    if tokens:
        hb = min(16, triton.next_power_of_2(max(heads, kv_heads)))
        parts = triton.cdiv(heads, hb) + 2 * triton.cdiv(kv_heads, hb)
        _rotary_kernel[(tokens, parts)](
            q, k, v, cos_sin, batch.positions, batch.kv_index, k_cache, v_cache,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], BLOCK_SIZE=k_cache.shape[1], HEADS=heads,
            KV_HEADS=kv_heads, D=d, D_PAD=triton.next_power_of_2(d), HALF=half, HALF_PAD=triton.next_power_of_2(half),
            HB=hb, num_warps=4,
        )  # fmt: skip
    return q
