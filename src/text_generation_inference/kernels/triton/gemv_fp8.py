# pyright: basic, reportMissingImports=false
"""Matrix products in FP8 for a single row, with what happens before and after them in the same kernel.

Like `vector`, but a program goes through many rows of the weight: what the input needs first (norm, scale,
rounding to FP8 as `quantize_rows` does it) would otherwise take as long as reading the weight. Started while the
kernel before still ends it is slower, as measured in whole steps: its programs wait where that one's still work.
"""

import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.triton.gemv import GATES, gated, normalised
from text_generation_inference.kernels.triton.quantize import BY_ROW, STATIC


@triton.jit
def _multiply(weights, row, inside, WHOLE: tl.constexpr):
    product = weights.to(tl.float32) * row[None, :]
    if not WHOLE:  # what is past the end may be no number, and stays none when it is multiplied with 0
        product = tl.where(inside[None, :], product, 0.0)
    return tl.sum(product, 1)


@triton.jit
def _gemv_fp8_kernel(
    x, weight, weight_scale, input_scale, norm_weight, bias, out, eps, columns,
    N: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    FORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """BN outputs at a time. GATE: the weight holds N gates, then N values. FORM: of the input, see `quantize`."""
    k = tl.arange(0, K_PAD)
    # Not K, which is known when this is compiled: the assembler makes 0xff, which is no number, of zeros that it knows.
    inside = k < columns
    kind = out.dtype.element_ty
    row = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        row = normalised(row, norm_weight + k, tl.rsqrt(tl.sum(row * row, 0) / K + eps), inside, kind)
    if FORM == BY_ROW:
        scale = tl.maximum(tl.max(tl.abs(row), 0) / 448.0, 1e-12)
    else:
        scale = tl.load(input_scale)
    row = (row * (1.0 / scale)).to(weight.dtype.element_ty).to(tl.float32)
    for tile in tl.range(tl.program_id(0), (N + BN - 1) // BN, tl.num_programs(0), num_stages=STAGES):
        n = tile * BN + tl.arange(0, BN)
        here = n < N
        at = weight + n[:, None].to(tl.int64) * K + k[None, :]
        weights = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        result = _multiply(weights, row, inside, K == K_PAD)
        result *= scale * tl.load(weight_scale + n, mask=here, other=0.0)
        if BIAS:
            result += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
        result = result.to(kind).to(tl.float32)
        if GATE:
            weights = tl.load(
                at + N * K, mask=here[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
            )
            up = _multiply(weights, row, inside, K == K_PAD)
            up *= scale * tl.load(weight_scale + N + n, mask=here, other=0.0)
            if BIAS:
                up += tl.load(bias + N + n, mask=here, other=0.0).to(tl.float32)
            result = gated(result, up.to(kind).to(tl.float32), kind, GATE)
        if ADD:
            result += tl.load(out + n, mask=here, other=0.0).to(tl.float32)
        tl.store(out + n, result.to(kind), mask=here)


def choose_shape(k: int, roomy: bool = True) -> tuple[int, int, int, int]:
    """(outputs at a time, stages, warps, programs per processor). Measured on an H200, see `bench/cuda_products.py`.

    `roomy`: a processor has more shared memory than 100 KB.
    """
    if k <= 8192:
        return (4 if k <= 4096 else 2), 3, 4, 3
    return (2, 3, 16, 1) if k > 16384 and roomy else (1, 3, 8, 2)


class GemvFp8:
    """The op, for a device with so many processors."""

    def __init__(self, num_processors: int, roomy: bool = True) -> None:
        self._num_processors, self._roomy = num_processors, roomy

    def __call__(
        self,
        x: Tensor,  # [1, in]
        weight: Fp8Weight,  # [out, in], or [2 * out, in] with a gate; a scale per output
        out: Tensor,  # [1, out]
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,  # weight and epsilon
        gate: str | None = None,  # "silu" or "gelu_tanh"
        add: bool = False,  # to what is in out
        shape: tuple[int, int, int, int] | None = None,
    ) -> None:
        k, n = x.shape[1], out.shape[1]
        bn, stages, warps, each = shape or choose_shape(k, self._roomy)
        input_scale = weight.scale if weight.input_scale is None else weight.input_scale
        form = (BY_ROW if weight.input_scale is None else STATIC).value
        _gemv_fp8_kernel[(min(triton.cdiv(n, bn), each * self._num_processors),)](
            x, weight.data, weight.scale, input_scale, norm[0] if norm else x, x if bias is None else bias, out,
            norm[1] if norm else 0.0, k, N=n, K=k, K_PAD=triton.next_power_of_2(k), BN=bn, STAGES=stages,
            NORM=norm is not None, FORM=form,
            GATE=GATES.index(gate), ADD=add, BIAS=bias is not None, num_warps=warps,
        )  # fmt: skip
