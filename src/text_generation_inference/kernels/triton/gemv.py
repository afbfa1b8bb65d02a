# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Matrix products for a single row, with what happens before and after them in the same kernel.

With one row a product is a read of its weight, and the kernel is built for that alone: a program reads whole
rows of the weight straight into registers, and starts to before the kernel in front of it has ended. Optionally the
input is normalised first, the output gated by silu or gelu, or added to the residual stream.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before

GATES = (None, "silu", "gelu_tanh")


@triton.jit
def normalised(part, gain_at, factor, inside, kind: tl.constexpr):
    """Rounded as the op `rms_norm` rounds."""
    gain = tl.load(gain_at, mask=inside, other=0.0)
    return ((part * factor).to(gain.dtype).to(tl.float32) * gain.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def gated(gate, up, kind: tl.constexpr, GATE: tl.constexpr):
    """1: silu, 2: gelu."""
    if GATE == 1:
        gate = gate / (1 + tl.exp(-gate))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * (1 - 1 / (tl.exp(2 * inner) + 1))
    return (gate.to(kind).to(tl.float32) * up).to(kind).to(tl.float32)


@triton.jit
def _gemv_kernel(
    x, weight, norm_weight, bias, out, eps,
    N: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN outputs. GATE 1 (silu) or 2 (gelu): the weight holds N gates, then N values."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_mask = (n < N)[:, None]
    k = tl.arange(0, BK)
    at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    tile = tl.load(at, mask=n_mask & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if GATE:
        up_tile = tl.load(at + N * K, mask=n_mask & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_kernel_before(DEPENDENT)
    kind = out.dtype.element_ty
    if NORM:
        whole = tl.arange(0, K_PAD)
        row = tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(row * row, 0) / K + eps)
    acc = tl.zeros((BN, BK), tl.float32)
    up_acc = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        inside = k0 + k < K
        if k0 > 0:
            tile = tl.load(at + k0, mask=n_mask & inside[None, :], other=0.0, eviction_policy="evict_first")
            if GATE:
                up_tile = tl.load(
                    at + N * K + k0, mask=n_mask & inside[None, :], other=0.0, eviction_policy="evict_first"
                )
        part = tl.load(x + k0 + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            part = normalised(part, norm_weight + k0 + k, factor, inside, x.dtype.element_ty)
        acc += tile.to(tl.float32) * part[None, :]
        if GATE:
            up_acc += up_tile.to(tl.float32) * part[None, :]
    result = tl.sum(acc, 1)
    if BIAS:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    result = result.to(kind).to(tl.float32)
    if GATE:
        up = tl.sum(up_acc, 1)
        if BIAS:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        result = gated(result, up.to(kind).to(tl.float32), kind, GATE)
    if ADD:
        result += tl.load(out + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(kind), mask=n < N)


def choose_shape(k: int) -> tuple[int, int, int]:
    """(outputs per program, columns at a time, warps). Measured on an H200, see `bench/cuda_products.py`."""
    pad = triton.next_power_of_2(k)
    return (2, pad, 4 if pad >= 1024 else 1) if pad <= 4096 else (8, 2048, 4)


def vector_product(
    x: Tensor,  # [1, in]
    weight: Tensor,  # [out, in], or [2 * out, in] with a gate
    out: Tensor,  # [1, out] of x's type, or float32
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,  # weight and epsilon
    gate: str | None = None,  # "silu" or "gelu_tanh"
    add: bool = False,  # to what is in out
    shape: tuple[int, int, int] | None = None,
) -> None:
    k, n = x.shape[1], out.shape[1]
    bn, bk, warps = shape or choose_shape(k)
    _gemv_kernel[(triton.cdiv(n, bn),)](
        x, weight, norm[0] if norm else x, x if bias is None else bias, out, norm[1] if norm else 0.0, N=n, K=k,
        K_PAD=triton.next_power_of_2(k), BN=bn, BK=bk, NORM=norm is not None,
        GATE=GATES.index(gate), ADD=add, BIAS=bias is not None,
        DEPENDENT=dependent_launch(1), num_warps=warps, launch_pdl=dependent_launch(1),
    )  # fmt: skip
