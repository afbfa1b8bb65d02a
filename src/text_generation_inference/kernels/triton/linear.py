# pyright: basic, reportMissingImports=false
"""Matrix products: the libraries' own, and for few rows in FP8 ours; those of few bits are in `low_bit_linear`.

The libraries take eight-bit operands from capability 8.9 on, with a scale per row from 9.0 on; sizes must be
multiples of 16 (128 for scales per square). What they cannot take is multiplied in the type of the result.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels.fp8 import (
    FP8,
    SQUARE,
    Fp8Rows,
    Fp8Weight,
    ScaledRows,
    dequantize_rows,
    dequantize_weight,
)
from text_generation_inference.kernels.matrices import Product, Rows, Weight, plain
from text_generation_inference.kernels.triton.launch import has_room
from text_generation_inference.kernels.triton.low_bit_codes import TritonLowBit
from text_generation_inference.kernels.triton.low_bit_linear import Int8Weight, LowBitLinear
from text_generation_inference.kernels.triton.quantize import quantize_rows
from text_generation_inference.kernels.triton.small_gemm import MAX_ROWS, SmallGemm

# With so many rows the library's products are faster without scales per row, and applying those later costs little.
_MAX_SCALED_LATER = 512


class TritonLinear:
    """The ops `linear` and `linear_unscaled` for one device."""

    def __init__(self, num_processors: int, capability: tuple[int, int]) -> None:
        self._small_gemm = SmallGemm(num_processors, measured=has_room(capability))
        self._low_bit = LowBitLinear(num_processors, capability)
        self._by_row = capability >= (9, 0)
        self._by_square = capability[0] == 9  # later ones want other scales
        self._fp8 = capability >= (8, 9)
        self._one: Tensor | None = None

    def __call__(self, x: Rows, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(weight, TritonLowBit | Int8Weight):
            assert isinstance(x, Tensor)
            return self._low_bit(x, weight, bias, dtype)
        if not isinstance(weight, Fp8Weight):
            return reference.linear(x, weight, bias)
        rows = quantize_rows(x, weight) if isinstance(x, Tensor) else x
        target = dtype or (x.dtype if isinstance(x, Tensor) else torch.bfloat16)
        if rows.shape[0] == 0:
            return torch.empty((0, weight.shape[0]), dtype=target, device=rows.data.device)
        if weight.by_square:
            return self._by_squares(rows, weight, bias, target)
        n, k = weight.shape
        if rows.shape[0] <= MAX_ROWS and k % 16 == 0 and self._fp8:
            out = torch.empty((rows.shape[0], n), dtype=target, device=rows.data.device)
            self._small_gemm(rows, weight, out, bias)
            return out
        if n % 16 or k % 16 or not self._fp8:
            return _plainly(rows, weight, bias, target)
        if self._by_row and target is not torch.float32:  # which the library does not give with scales per row
            out = torch._scaled_mm(
                rows.data, weight.data.t(), rows.scale[:, None], weight.scale[None, :],
                out_dtype=torch.bfloat16, use_fast_accum=True,
            )  # fmt: skip
            return _finish(out, bias, target)
        out = self._unscaled(rows, weight, torch.float32)
        return _finish(out * rows.scale[:, None] * weight.scale[None, :], bias, target)

    def linear_unscaled(self, x: Rows, weight: Fp8Weight, dtype: torch.dtype) -> Product:
        """Without the scales where that is faster. Not for float16: the sums would not fit."""
        n, k = weight.shape
        later = MAX_ROWS < x.shape[0] <= _MAX_SCALED_LATER and self._fp8 and dtype is torch.bfloat16
        if not later or weight.by_square or n % 16 or k % 16:
            return self(x, weight, None, dtype)
        rows = quantize_rows(x, weight) if isinstance(x, Tensor) else x
        return ScaledRows(self._unscaled(rows, weight, dtype), rows.scale, weight.scale)

    def _unscaled(self, rows: Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        if self._one is None:
            self._one = torch.ones((), device=rows.data.device)
        return torch._scaled_mm(rows.data, weight.data.t(), self._one, self._one, out_dtype=dtype, use_fast_accum=True)

    def _by_squares(self, rows: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        n, k = weight.shape
        if n % SQUARE or k % (4 * SQUARE) or not self._by_square:
            return _plainly(rows, weight, bias, dtype)
        count, missing = rows.shape[0], -rows.shape[0] % 4
        data, scale = rows.data, rows.scale
        if missing:  # the library wants a multiple of 4
            data = F.pad(data.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
            scale = F.pad(scale, (0, 0, 0, missing))
        scale = scale.t().contiguous().t()  # the scales of a group of columns lie together
        out = torch._scaled_mm(data, weight.data.t(), scale, weight.scale.t(), out_dtype=torch.bfloat16)
        return _finish(out[:count], bias, dtype)


def logits(hidden: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """See `reference.logits`; the result is float32, as it was summed: rounded, near scores would become equal."""
    if hidden.dtype is torch.float32 or not hidden.is_cuda:
        return reference.logits(hidden, weight, out)
    if out is None:
        return torch.mm(hidden, plain(weight).t(), out_dtype=torch.float32)
    return torch.mm(hidden, plain(weight).t(), out_dtype=torch.float32, out=out)


def _plainly(rows: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(dequantize_rows(rows).to(dtype), dequantize_weight(weight).to(dtype), bias)


def _finish(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (out if bias is None else out + bias).to(dtype)
