# pyright: basic, reportMissingImports=false
"""Matrix products in FP8 for a single row, with what happens before and after them in the same kernel.

Like `vector`, but a program goes through many rows of the weight: what the input needs first (norm, scale,
rounding to FP8 as `quantize_rows` does it) would otherwise take as long as reading the weight. Started while the
kernel before still ends it is slower, as measured in whole steps: its programs wait where that one's still work.
"""

from dataclasses import dataclass

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


@triton.jit
def _gemv_fp8_chunks_kernel(
    x, weight, weight_scale, input_scale, bias, out, columns,
    N: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    FORM: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """For rows too long for the registers: BN outputs at a time, in chunks of BK columns (which divides K).

    One loop over all chunks of all outputs, so that reads run ahead from one output to the next; threads meet once per
    output, not once per chunk.
    """
    CHUNKS: tl.constexpr = K // BK
    kind = out.dtype.element_ty
    k = tl.arange(0, BK)
    if FORM == BY_ROW:
        whole = tl.arange(0, K_PAD)
        row = tl.load(x + whole, mask=whole < columns, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(row), 0) / 448.0, 1e-12)
    else:
        scale = tl.load(input_scale)
    inverse = 1.0 / scale
    tiles = (N + BN - 1) // BN
    mine = (tiles - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)
    acc = tl.zeros((BN, BK), tl.float32)
    for step in tl.range(0, mine * CHUNKS, num_stages=STAGES):
        n = (tl.program_id(0) + step // CHUNKS * tl.num_programs(0)) * BN + tl.arange(0, BN)
        here = n < N
        first = step % CHUNKS * BK
        at = weight + n[:, None].to(tl.int64) * K + (first + k)[None, :]
        weights = tl.load(at, mask=here[:, None], other=0.0, eviction_policy="evict_first")
        part = (tl.load(x + first + k).to(tl.float32) * inverse).to(weight.dtype.element_ty).to(tl.float32)
        acc = tl.where(first == 0, 0.0, acc) + weights.to(tl.float32) * part[None, :]
        if first == K - BK:
            result = tl.sum(acc, 1) * (scale * tl.load(weight_scale + n, mask=here, other=0.0))
            if BIAS:
                result += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
            result = result.to(kind).to(tl.float32)
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


@dataclass(frozen=True, slots=True)
class Chunks:
    """How long rows are read in chunks."""

    bn: int = 2  # outputs at a time
    bk: int = 4096  # columns
    stages: int = 6
    warps: int = 8
    each: int = 2  # programs per processor


class GemvFp8:
    """The op, for a device with so many processors."""

    chunks: Chunks | None = None  # rows beyond 16384 columns are read so, where there is neither norm nor gate

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
        chunks = self.chunks
        if chunks is not None and norm is None and gate is None and k > 16384 and k % chunks.bk == 0:
            _gemv_fp8_chunks_kernel[(min(triton.cdiv(n, chunks.bn), chunks.each * self._num_processors),)](
                x, weight.data, weight.scale, input_scale, x if bias is None else bias, out, k, N=n, K=k,
                K_PAD=triton.next_power_of_2(k), BN=chunks.bn, BK=chunks.bk, STAGES=chunks.stages, FORM=form, ADD=add,
                BIAS=bias is not None, num_warps=chunks.warps,
            )  # fmt: skip
            return
        _gemv_fp8_kernel[(min(triton.cdiv(n, bn), each * self._num_processors),)](
            x, weight.data, weight.scale, input_scale, norm[0] if norm else x, x if bias is None else bias, out,
            norm[1] if norm else 0.0, k, N=n, K=k, K_PAD=triton.next_power_of_2(k), BN=bn, STAGES=stages,
            NORM=norm is not None, FORM=form,
            GATE=GATES.index(gate), ADD=add, BIAS=bias is not None, num_warps=warps,
        )  # fmt: skip
