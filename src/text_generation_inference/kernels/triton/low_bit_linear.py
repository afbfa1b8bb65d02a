# pyright: basic, reportMissingImports=false
"""The op `linear` of matrices in few bits: up to some rows our own products, beyond the library's.

For the library the matrix is widened once for all rows, which takes as long as reading it some times; with many rows
that is little beside the product. Where there is room for them, its values are held beside the codes instead. Matrices
that multiply rows as integers have a form of their own, `Int8Weight`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import PackedWeight
from text_generation_inference.kernels.triton import low_bit_codes
from text_generation_inference.kernels.triton.launch import dependent_launch, has_room, wait_for_kernel_before
from text_generation_inference.kernels.triton.low_bit_codes import OFFSETS, ZERO_POINTS, TritonLowBit, rows_at, unpack
from text_generation_inference.kernels.triton.quantize import warps_for
from text_generation_inference.kernels.triton.small_gemm import MAX_ROWS as MAX_INT8_ROWS
from text_generation_inference.kernels.triton.small_gemm import SmallGemm
from text_generation_inference.kernels.triton.small_gemm_low_bit import SmallGemmLowBit, spread

_FEWER_THAN_WIDE = 64  # so many rows are multiplied with codes as fast as with the values, where those are there


@dataclass(slots=True)
class Int8Weight(PackedWeight):
    """Of integers of 8 bits with a scale for each output, for rows of the same kind."""

    data: Tensor  # [out, in] int8
    scale: Tensor  # [out] float32
    input_scale: Tensor | None  # [] float32; None: of each row its own

    @property
    def shape(self) -> torch.Size:  # pyright: ignore
        return self.data.shape


def pack_low_bit(weight: LowBitWeight, num_experts: int | None = None) -> TritonLowBit | Int8Weight:
    """See `Ops.pack_low_bit`."""
    by_row = weight.group_size >= weight.columns and weight.offset is None and weight.order is None
    if weight.quantizes_inputs and weight.bits == 8 and by_row and num_experts is None:
        data = (weight.codes ^ 128).view(torch.int8)
        return Int8Weight(data, weight.scale.reshape(-1).float(), weight.input_scale)
    packed = low_bit_codes.pack_low_bit(weight, num_experts or 1)
    if weight.keeps_wide:
        packed.wide = low_bit.widen(weight)
    return packed


@triton.jit
def _widen_kernel(
    words, scale, offset, table, out, N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, BITS: tl.constexpr,
    BN: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """One tile of columns of BN rows. Scales are applied in float32, as the definition does it."""
    BK: tl.constexpr = 512 // BITS
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_read = tl.minimum(n, N - 1)
    first = tl.program_id(1) * BK
    codes = tl.load(rows_at(words, n_read, BLOCKS) + tl.program_id(1) * 128, eviction_policy="evict_first")
    tile = unpack(codes, table, table, BN, BITS, TABLE, False, tl.float32, False)
    if OFFSET == ZERO_POINTS:
        tile -= spread(offset, first, n_read, N, K, GS, BK, BN) - 8
    tile *= spread(scale, first, n_read, N, K, GS, BK, BN)
    if OFFSET == OFFSETS:
        tile -= spread(offset, first, n_read, N, K, GS, BK, BN)
    k = first + tl.arange(0, BK)
    at = out + n[None, :].to(tl.int64) * K + k[:, None]
    tl.store(at, tile.to(out.dtype.element_ty), mask=(n < N)[None, :] & (k < K)[:, None])


def widen(weight: TritonLowBit, dtype: torch.dtype) -> Tensor:
    """-> `[out, columns]`: columns in the order of the matrix, not of inputs."""
    n = weight.shape[0]
    out = torch.empty((n, weight.columns), dtype=dtype, device=weight.words.device)
    offset = weight.scale if weight.offset is None else weight.offset
    _widen_kernel[(triton.cdiv(n, 64), weight.words.shape[2])](
        weight.words, weight.scale, offset, weight.scale if weight.table is None else weight.table, out,
        N=n, K=weight.columns, GS=weight.group_size, BITS=weight.bits, BN=64, TABLE=weight.codes_are,
        OFFSET=weight.offsets, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _to_int8_kernel(
    x, data, scales, input_scale, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait_for_kernel_before(DEPENDENT)
    value = tl.load(x + row * x_row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(input_scale)
    else:
        scale = tl.maximum(tl.max(tl.abs(value), 0) / 127.0, 1e-12)
    # Adding this rounds to the nearest integer, to the even one in the middle.
    whole = (tl.div_rn(value, scale + tl.zeros_like(value)) + 12582912.0) - 12582912.0
    whole = tl.minimum(tl.maximum(whole, -128.0), 127.0)
    tl.store(data + row * WIDTH + i, whole.to(tl.int8), mask=i < WIDTH)
    tl.store(scales + row, scale)


@dataclass(slots=True)
class Int8Rows:
    data: Tensor  # [rows, in] int8
    scale: Tensor  # [rows] float32

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


def quantize_rows(x: Tensor, input_scale: Tensor | None) -> Int8Rows:
    """See `low_bit.quantize_rows`."""
    rows, width = x.shape
    found = Int8Rows(
        torch.empty((rows, width), dtype=torch.int8, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    block = triton.next_power_of_2(width)
    dependent = dependent_launch(rows)
    _to_int8_kernel[(rows,)](
        x, found.data, found.scale, found.scale if input_scale is None else input_scale, x.stride(0), WIDTH=width,
        BLOCK=block, STATIC=input_scale is not None, DEPENDENT=dependent, num_warps=warps_for(block),
        launch_pdl=dependent,
    )  # fmt: skip
    return found


class LowBitLinear:
    """The op for one device."""

    def __init__(self, num_processors: int, capability: tuple[int, int]) -> None:
        self.few = SmallGemmLowBit(num_processors, roomy=has_room(capability), hopper=capability == (9, 0))
        self._few_int8 = SmallGemm(num_processors)
        self._has_tensor_cores = capability >= (8, 0) or capability == (0, 0)  # that our products are compiled for

    def __call__(
        self, x: Tensor, weight: TritonLowBit | Int8Weight, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        target = dtype or x.dtype
        if x.shape[0] == 0:
            return torch.empty((0, weight.shape[0]), dtype=target, device=x.device)
        if isinstance(weight, Int8Weight):
            return self._by_integers(x, weight, bias, target)
        if weight.quantizes_inputs:
            rows = quantize_rows(x, weight.input_scale)
            x = (rows.data.float() * rows.scale[:, None]).to(x.dtype)
        if weight.wide is not None and x.shape[0] > _FEWER_THAN_WIDE and x.dtype is weight.wide.dtype:
            return F.linear(x, weight.wide, None if bias is None else bias.to(x.dtype)).to(target)
        if self._is_few(x):
            out = torch.empty((x.shape[0], weight.shape[0]), dtype=target, device=x.device)
            self.few(x, weight, out, bias)
            return out
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        out = F.linear(x, widen(weight, x.dtype), None if bias is None else bias.to(x.dtype))
        return out.to(target)

    def _is_few(self, x: Tensor) -> bool:
        return x.shape[0] <= self.few.max_rows and x.dtype is not torch.float32 and self._has_tensor_cores

    def _by_integers(self, x: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rows = quantize_rows(x, weight.input_scale)
        n, k = weight.shape
        if (x.shape[0] <= MAX_INT8_ROWS or n % 8 or k % 8) and k % 16 == 0 and self._has_tensor_cores:
            out = torch.empty((x.shape[0], n), dtype=dtype, device=x.device)
            for first in range(0, x.shape[0], MAX_INT8_ROWS):
                part = Int8Rows(rows.data[first : first + MAX_INT8_ROWS], rows.scale[first : first + MAX_INT8_ROWS])
                self._few_int8(part, weight, out[first : first + MAX_INT8_ROWS], bias)
            return out
        if x.shape[0] > 16 and n % 8 == 0 and k % 8 == 0:
            product = torch._int_mm(rows.data, weight.data.t()).float()
        else:
            product = F.linear(rows.data.float(), weight.data.float())
        product = product * rows.scale[:, None] * weight.scale[None, :]
        return (product if bias is None else product + bias).to(dtype)
