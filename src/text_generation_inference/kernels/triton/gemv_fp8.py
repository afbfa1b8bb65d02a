# pyright: basic, reportMissingImports=false
"""Matrix products in FP8 for a single row, with what happens before and after them in the same kernel.

Like `vector`, but a program goes through many rows of the weight: what the input needs first (norm, scale,
rounding to FP8 as `quantize_rows` does it) would otherwise take as long as reading the weight. Started while the
kernel before still ends it is slower, as measured in whole steps: its programs wait where that one's still work.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.triton.gemv import GATES, gated, normalised
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before
from text_generation_inference.kernels.triton.quantize import BY_ROW, STATIC

_SUM_BLOCK = 128
_PART = 4096  # columns


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
    FORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """BN outputs at a time. GATE: the weight holds N gates, then N values. FORM: of the input, see `quantize`.

    PARTS: programs of the second dimension have K / PARTS columns each, and `out` is a row for each of them.
    """
    PART: tl.constexpr = K // PARTS
    kind = x.dtype.element_ty
    first = tl.program_id(1) * PART
    k = tl.arange(0, K_PAD)
    # Not K, which is known when this is compiled: the assembler makes 0xff, which is no number, of zeros that it knows.
    inside = k < columns
    row = tl.load(x + first + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        row = normalised(row, norm_weight + k, tl.rsqrt(tl.sum(row * row, 0) / K + eps), inside, kind)
    if FORM == BY_ROW:
        largest = tl.abs(row)
        if PARTS > 1:
            for part in tl.static_range(PARTS):
                other = tl.load(x + part * PART + k, mask=inside, other=0.0)
                largest = tl.maximum(largest, tl.abs(other.to(tl.float32)))
        scale = tl.maximum(tl.max(largest, 0) / 448.0, 1e-12)
    else:
        scale = tl.load(input_scale)
    row = (row * (1.0 / scale)).to(weight.dtype.element_ty).to(tl.float32)
    for tile in tl.range(tl.program_id(0), (N + BN - 1) // BN, tl.num_programs(0), num_stages=STAGES):
        n = tile * BN + tl.arange(0, BN)
        here = n < N
        at = weight + n[:, None].to(tl.int64) * K + first + k[None, :]
        weights = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        result = _multiply(weights, row, inside, PART == K_PAD)
        result *= scale * tl.load(weight_scale + n, mask=here, other=0.0)
        if BIAS:
            result += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
        if PARTS > 1:
            tl.store(out + tl.program_id(1) * N + n, result, mask=here)
        else:
            result = result.to(kind).to(tl.float32)
        if GATE:
            weights = tl.load(
                at + N * K, mask=here[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
            )
            up = _multiply(weights, row, inside, PART == K_PAD)
            up *= scale * tl.load(weight_scale + N + n, mask=here, other=0.0)
            if BIAS:
                up += tl.load(bias + N + n, mask=here, other=0.0).to(tl.float32)
            result = gated(result, up.to(kind).to(tl.float32), kind, GATE)
        if ADD:
            result += tl.load(out + n, mask=here, other=0.0).to(tl.float32)
        if PARTS == 1:
            tl.store(out + n, result.to(kind), mask=here)


@triton.jit
def _sum_parts_kernel(
    parts, bias, out, N: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What the parts of a row have given, rounded and added as the product of the whole row is."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < N
    kind = out.dtype.element_ty
    wait_for_kernel_before(DEPENDENT)
    result = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        result += tl.load(parts + part * N + n, mask=here, other=0.0)
    if BIAS:
        result += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
    result = result.to(kind).to(tl.float32)
    if ADD:
        result += tl.load(out + n, mask=here, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(kind), mask=here)


class Shape(NamedTuple):
    outputs: int  # at a time
    stages: int
    warps: int
    programs: int  # on each processor
    parts: int = 1  # of the row; they divide it


def choose_shape(n: int, k: int, plain: bool = True, roomy: bool = True) -> Shape:
    """Measured on an H200, see `bench/cuda_products.py` and `bench/cuda_70b.py`.

    `plain`: the row is neither normalised before nor gated after the product. `roomy`: a processor has more shared
    memory than 100 KB.
    """
    if k <= 8192:
        return Shape(4 if k <= 4096 else 2, 3, 4, 3)
    # Measured faster than programs of 16 warps that have the whole row, though one more kernel adds the parts up.
    if k > 16384 and k % _PART == 0 and n < k and plain and roomy:
        return Shape(4, 3, 4, 3, parts=k // _PART)
    return Shape(2, 3, 16, 1) if k > 16384 and roomy else Shape(1, 3, 8, 2)


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
        shape: Shape | None = None,
    ) -> None:
        k, n = x.shape[1], out.shape[1]
        chosen = shape or choose_shape(n, k, norm is None and gate is None, self._roomy)
        bn, parts = chosen.outputs, chosen.parts
        assert parts == 1 or (k % (16 * parts) == 0 and norm is None and gate is None)
        target = out if parts == 1 else torch.empty((parts, n), dtype=torch.float32, device=out.device)
        input_scale = weight.scale if weight.input_scale is None else weight.input_scale
        form = (BY_ROW if weight.input_scale is None else STATIC).value
        programs = max(1, chosen.programs * self._num_processors // parts)
        _gemv_fp8_kernel[(min(triton.cdiv(n, bn), programs), parts)](
            x, weight.data, weight.scale, input_scale, norm[0] if norm else x, x if bias is None else bias, target,
            norm[1] if norm else 0.0, k // parts, N=n, K=k, K_PAD=triton.next_power_of_2(k // parts), BN=bn,
            STAGES=chosen.stages, NORM=norm is not None, FORM=form, GATE=GATES.index(gate), ADD=add and parts == 1,
            BIAS=bias is not None and parts == 1, PARTS=parts, num_warps=chosen.warps,
        )  # fmt: skip
        if parts > 1:
            dependent = dependent_launch(1)
            _sum_parts_kernel[(triton.cdiv(n, _SUM_BLOCK),)](
                target, x if bias is None else bias, out, N=n, PARTS=parts, BLOCK=_SUM_BLOCK, ADD=add,
                BIAS=bias is not None, DEPENDENT=dependent, num_warps=2, launch_pdl=dependent,
            )  # fmt: skip
