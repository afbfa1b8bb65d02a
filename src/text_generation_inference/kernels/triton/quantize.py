# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Rows in FP8: how a kernel stores what it has computed, and the op for rows that no other kernel made.

The definition is `kernels.fp8`. Here a value is multiplied by the inverse of its scale, where the
definition divides: a value in the middle between two may be rounded the other way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.fp8 import FP8, SQUARE, Fp8Rows, Fp8Weight
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before

# How a row is stored: as it is, or in FP8 with a scale per row, one scale for all, one per 128 columns.
PLAIN, BY_ROW, STATIC, BY_SQUARE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def store_columns(value, at, scales, input_scale, i, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Store columns `i` (BLOCK of them, from a multiple of BLOCK on) of a row that starts at `at`.

    `value` is float32 and already rounded as the activations are. BY_ROW needs all columns at once. The conversion to
    FP8 saturates.
    """
    mask = i < WIDTH
    if FORM == PLAIN:
        tl.store(at + i, value.to(at.dtype.element_ty), mask=mask)
    elif FORM == BY_SQUARE:
        squares = tl.reshape(value, (BLOCK // 128, 128))
        scale = tl.maximum(tl.max(tl.abs(squares), 1) / 448.0, 1e-12)
        small = tl.reshape((squares * (1.0 / scale)[:, None]).to(at.dtype.element_ty), (BLOCK,))
        tl.store(at + i, small, mask=mask)
        square = tl.min(i, 0) // 128 + tl.arange(0, BLOCK // 128)
        tl.store(scales + square, scale, mask=square < (WIDTH + 127) // 128)
    else:
        if FORM == BY_ROW:
            scale = tl.maximum(tl.max(tl.abs(value), 0) / 448.0, 1e-12)
        else:
            scale = tl.load(input_scale)
        tl.store(at + i, (value * (1.0 / scale)).to(at.dtype.element_ty), mask=mask)
        tl.store(scales, scale)


@triton.jit
def store_row(value, rest, at, scales, i, j, WIDTH: tl.constexpr):
    """Like `store_columns` BY_ROW, for a row in two parts: all of `value`'s columns are there."""
    largest = tl.maximum(tl.max(tl.abs(value), 0), tl.max(tl.abs(rest), 0))
    scale = tl.maximum(largest / 448.0, 1e-12)
    tl.store(at + i, (value * (1.0 / scale)).to(at.dtype.element_ty))
    tl.store(at + j, (rest * (1.0 / scale)).to(at.dtype.element_ty), mask=j < WIDTH)
    tl.store(scales, scale)


class RowStore:
    """Where a kernel stores `[rows, width]`, and the arguments that say how."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, quantize_for: Fp8Weight | None
    ) -> None:
        self.data = torch.empty((rows, width), dtype=dtype if quantize_for is None else FP8, device=device)
        self.form, self.scales, self.input_scale = PLAIN.value, self.data, self.data
        if quantize_for is not None:
            squares = -(-width // SQUARE)
            self.form = (
                BY_SQUARE if quantize_for.by_square else BY_ROW if quantize_for.input_scale is None else STATIC
            ).value
            shape = (rows, squares) if quantize_for.by_square else (rows,)
            self.scales = self.input_scale = torch.empty(shape, dtype=torch.float32, device=device)
            if quantize_for.input_scale is not None:
                self.input_scale = quantize_for.input_scale
        self.scales_row = 0 if quantize_for is None else self.scales.stride(0)

    def block(self, width: int, most: int) -> int:
        """Columns of one program: all of them where the scale is known only after the last."""
        whole = max(SQUARE, triton.next_power_of_2(width))
        return whole if self.form == BY_ROW.value else min(most, whole)

    @property
    def result(self) -> Tensor | Fp8Rows:
        return self.data if self.form == PLAIN.value else Fp8Rows(self.data, self.scales)


@triton.jit
def _quantize_kernel(
    x, data, scales, input_scale, x_row, scales_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENT:
        wait_for_kernel_before()
    value = tl.load(x + row * x_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    store_columns(value, data + row * WIDTH, scales + row * scales_row, input_scale, i, WIDTH, BLOCK, FORM)


def quantize_rows(x: Tensor, quantize_for: Fp8Weight) -> Fp8Rows:
    """x `[tokens, in]` in the form that `quantize_for` is multiplied with."""
    rows, width = x.shape
    store = RowStore(rows, width, x.dtype, x.device, quantize_for)
    if rows:
        block = store.block(width, 4096)
        dependent = dependent_launch(rows)
        _quantize_kernel[(rows, triton.cdiv(width, block))](
            x, store.data, store.scales, store.input_scale, x.stride(0), store.scales_row,
            WIDTH=width, BLOCK=block, FORM=store.form, DEPENDENT=dependent,
            num_warps=warps_for(block), launch_pdl=dependent,
        )  # fmt: skip
    return Fp8Rows(store.data, store.scales)


def warps_for(block: int) -> int:
    return min(16, max(1, block // 512))
