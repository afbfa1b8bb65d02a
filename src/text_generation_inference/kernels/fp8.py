"""Matrices and rows in FP8 (e4m3), and the ops on them in plain torch: the definition of the faster ones.

A value is its FP8 times a float32 scale. Weights have a scale per output row, or per square of
128 x 128; rows (activations) one per row, or per 128 columns of a row. Quantising rounds to the nearest value and
clamps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.partial_sum import PartialSum

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)  # powers of two; torch 2.6 has none
SQUARE = 128
_SMALLEST_SCALE = 1e-12  # of a row of zeros
_ROWS_AT_A_TIME = 8 * SQUARE


@dataclass(slots=True)
class Fp8Weight:
    data: Tensor  # [out, in] e4m3
    scale: Tensor  # float32: [out], or [ceil(out / 128), ceil(in / 128)]
    input_scale: Tensor | None = None  # [] float32, the same for all inputs; None: found from the inputs themselves
    dtype: torch.dtype = torch.float32  # of the values that the matrix stands for, and of its products
    input_bound: float | None = None  # inputs are clamped to it before they are quantised, by whoever has them
    full_scale: float = FP8_MAX  # the largest e4m3 that its scales were chosen for

    @property
    def by_square(self) -> bool:
        return self.scale.ndim == 2

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


@dataclass(slots=True)
class Fp8Rows:
    data: Tensor  # [tokens, in] e4m3
    scale: Tensor  # float32: [tokens], or [tokens, ceil(in / 128)]

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


@dataclass(slots=True)
class ScaledRows:
    """A product whose scales are still to be applied: value = data * rows * columns. See `Ops.linear_unscaled`."""

    data: Tensor  # [tokens, out]
    rows: Tensor  # [tokens] float32
    columns: Tensor  # [out] float32

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class AttentionScales:
    """Of what attention multiplies in FP8. Weights are relative to the largest of their row, so at most 1."""

    query: float
    key: float
    weight: float
    value: float


def apply_scales(x: Tensor | ScaledRows | PartialSum) -> Tensor:
    """A product with all that was left to the op that comes next."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, PartialSum):
        return x.total()
    return (x.data.float() * x.rows[:, None] * x.columns[None, :]).to(x.data.dtype)


def split_scales(x: Tensor | ScaledRows | PartialSum) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """A product, and its scales as an argument of the op that applies them, where there are any."""
    return (x.data, (x.rows, x.columns)) if isinstance(x, ScaledRows) else (apply_scales(x), None)


def apply_scales_to_heads(parts: Sequence[Tensor], rows: Tensor, columns: Tensor) -> None:
    """In place. parts, each `[tokens, heads, head_dim]`, are the columns of a product, side by side."""
    first = 0
    for part in parts:
        heads, dim = part.shape[1:]
        factors = columns[first : first + heads * dim].view(heads, dim)
        part.copy_(part.float() * rows[:, None, None] * factors)
        first += heads * dim


def to_fp8(x: Tensor, largest: float = FP8_MAX) -> Tensor:
    return x.float().clamp(-largest, largest).to(FP8)


def rounded(x: Tensor, scale: float) -> Tensor:
    """What x is once it has been in FP8 with this scale, in its type."""
    return (to_fp8(x.float() / scale).float() * scale).to(x.dtype)


def pack_attention_scales(scales: AttentionScales) -> AttentionScales:
    """Bring scales into the form `attention` wants. Called once, before the first pass."""
    return scales


def pack_fp8(weight: Fp8Weight) -> Fp8Weight:
    """Bring a weight into the form `linear` wants. Called once after loading."""
    return weight


def quantize_rows(x: Tensor, quantize_for: Fp8Weight) -> Fp8Rows:
    """x `[tokens, in]` in the form that `quantize_for` is multiplied with."""
    wide = x.float()
    if quantize_for.input_scale is not None and not quantize_for.by_square:
        scale = quantize_for.input_scale.expand(x.shape[0])
        return Fp8Rows(to_fp8(wide / scale[:, None]), scale.contiguous())
    if not quantize_for.by_square:
        scale = (wide.abs().amax(-1) / FP8_MAX).clamp(min=_SMALLEST_SCALE)
        return Fp8Rows(to_fp8(wide / scale[:, None]), scale)
    tokens, width = x.shape
    groups = F.pad(wide, (0, -width % SQUARE)).view(tokens, -1, SQUARE)
    scale = (groups.abs().amax(-1) / FP8_MAX).clamp(min=_SMALLEST_SCALE)
    data = to_fp8(groups / scale[..., None]).view(torch.uint8).view(tokens, -1)[:, :width]
    return Fp8Rows(data.contiguous().view(FP8), scale)


def dequantize_rows(rows: Fp8Rows) -> Tensor:
    """-> float32 `[tokens, in]`."""
    if rows.scale.ndim == 1:
        return rows.data.float() * rows.scale[:, None]
    return rows.data.float() * rows.scale.repeat_interleave(SQUARE, 1)[:, : rows.shape[1]]


def quantize_weight(weight: Tensor, by_square: bool = False) -> Fp8Weight:
    """weight `[out, in]`, with a scale per output row or per square. A few rows at a time, as they are widened."""
    data = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales: list[Tensor] = []
    for first in range(0, weight.shape[0], _ROWS_AT_A_TIME):
        wide = weight[first : first + _ROWS_AT_A_TIME].float()
        scale = (_largest(wide, by_square) / FP8_MAX).clamp(min=_SMALLEST_SCALE)
        scales.append(scale)
        data[first : first + _ROWS_AT_A_TIME] = to_fp8(wide / spread(scale, *wide.shape))
    return Fp8Weight(data, torch.cat(scales), dtype=weight.dtype)


def _largest(wide: Tensor, by_square: bool) -> Tensor:
    if not by_square:
        return wide.abs().amax(-1)
    rows, columns = wide.shape
    padded = F.pad(wide.abs(), (0, -columns % SQUARE, 0, -rows % SQUARE))
    return padded.view(-(-rows // SQUARE), SQUARE, -(-columns // SQUARE), SQUARE).amax((1, 3))


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The scales of a weight in a form that broadcasts to its rows and columns."""
    if scale.ndim == 1:
        return scale[:, None]
    return scale.repeat_interleave(SQUARE, 0)[:rows].repeat_interleave(SQUARE, 1)[:, :columns]


def dequantize_weight(weight: Fp8Weight) -> Tensor:
    """-> float32 `[out, in]`."""
    return weight.data.float() * spread(weight.scale, *weight.shape)


def linear(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """-> `[tokens, out]` of `dtype`, summed in float32."""
    out = F.linear(dequantize_rows(x), dequantize_weight(weight))
    return (out if bias is None else out + bias.float()).to(dtype)
