# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""The product of a single row with a matrix in 4 bits, on GPUs of capability 9.0.

A program makes 16 outputs, its warps share the columns: each takes every so-manieth tile of codes, straight into
registers and before the kernel in front has ended. The warps' sums meet once, at the end; nothing else goes from warp
to warp, and no program waits for another one. RAW: numbers are multiplied without the center of the codes being
subtracted; the sum of the row's columns, by which that is too high, is a product with a constant matrix where sums
begin.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.triton.gemv import GATES, gated
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before
from text_generation_inference.kernels.triton.low_bit_codes import (
    CROSSED,
    NO_OFFSETS,
    TritonLowBit,
    generation_of,
    raw_center,
    unpack,
)


@triton.jit
def _columns(x, block, zero, kind: tl.constexpr, COUNT: tl.constexpr, ASM: tl.constexpr):
    """Of a row the columns of tiles `block` `[COUNT]`, CROSSED -> `[COUNT, 128, 8]`, eight times the same."""
    # word, half, thread: four columns each, of which two are of either pair
    place = tl.arange(0, 32)
    at = x.to(tl.pointer_type(tl.int32)) + block[:, None] * 64 + place[None, :] * 2
    if ASM:
        first, second = tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at + zero], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        first, second = tl.load(at), tl.load(at + 1)
    both = tl.join(first, second)  # count, place, pair
    low = both.to(tl.int16).to(kind, bitcast=True)
    high = (both >> 16).to(tl.int16).to(kind, bitcast=True)
    apart = tl.reshape(tl.join(low, high), (COUNT, 4, 2, 4, 2, 2))  # count, word, half, thread, pair, column
    row = tl.reshape(tl.permute(apart, (0, 1, 4, 3, 2, 5)), (COUNT, 128))
    return tl.broadcast_to(row[:, :, None], (COUNT, 128, 8))


@triton.jit
def _product(codes, given, start, scales, kind: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, ASM, RAW):
    """`[TILES * WARPS, 16, 8]`: of each tile 16 outputs, eight times the same."""
    tile = unpack(codes, codes, codes, 16 * TILES * WARPS, 4, False, False, kind, ASM, CROSSED, RAW)
    apart = tl.permute(tl.reshape(tile, (128, TILES, 2, WARPS, 8)), (1, 3, 2, 4, 0))
    tile = tl.reshape(apart, (TILES * WARPS, 16, 128))
    return tl.dot(tile, given, start) * scales.to(tl.float32)[:, :, None]


@triton.jit
def _fetch_rest(words, first, BLOCKS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Have what a program reads after its first tiles in the cache of the chip: compilers put loads off."""
    LINES: tl.constexpr = BLOCKS * 4  # of 128 bytes, of eight rows
    line = tl.minimum(AT_ONCE * 4 + tl.arange(0, triton.next_power_of_2(LINES - AT_ONCE * 4)), LINES - 1)
    eight = first // 8 + tl.arange(0, 2)
    at = words + (eight[:, None] * LINES + line[None, :]) * 32
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _scales(scale, block, n, GS: tl.constexpr, ALL: tl.constexpr):
    return tl.load(scale + (block * 128 // GS)[:, None] * ALL + n[None, :])


@triton.jit
def row_product(
    x, words, scale, bias, out,
    N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, GATE: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, ASM: tl.constexpr, RAW: tl.constexpr, FETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """16 outputs. A warp takes TILES tiles of codes at a time. GATE: the matrix holds N gates, then N values."""
    BLOCKS: tl.constexpr = K // 128
    ALL: tl.constexpr = 2 * N if GATE else N
    AT_ONCE: tl.constexpr = TILES * WARPS
    TURNS: tl.constexpr = BLOCKS // AT_ONCE
    kind = x.dtype.element_ty
    first = tl.program_id(0) * 16
    n = first + tl.arange(0, 16)
    block = tl.arange(0, AT_ONCE)
    # Rows of a load: tile, half of the 16 rows, warp, row of eight. What a thread reads is what it multiplies.
    r = tl.arange(0, 16 * AT_ONCE)
    row, mine = first + r % 8 + r // (8 * WARPS) % 2 * 8, r // 8 % WARPS + r // (16 * WARPS) * WARPS
    # Tiles lie one after the other: of eight rows 128 words each.
    at = words + (row // 8 * BLOCKS + mine)[:, None] * 128 + (row % 8 * 16)[:, None] + tl.arange(0, 16)[None, :]
    UP: tl.constexpr = N // 8 * BLOCKS * 128
    codes = tl.load(at, eviction_policy="evict_first")
    scales = _scales(scale, block, n, GS, ALL)
    if GATE:
        up_codes = tl.load(at + UP, eviction_policy="evict_first")
        up_scales = _scales(scale + N, block, n, GS, ALL)
    if ASM and FETCH and TURNS > 1:
        _fetch_rest(words, first, BLOCKS, AT_ONCE)
        if GATE:
            _fetch_rest(words, first + N, BLOCKS, AT_ONCE)
    wait_for_kernel_before(DEPENDENT)
    zero = 0
    if ASM:  # keeps reading the row behind the wait
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [first], dtype=tl.int32, is_pure=False, pack=1)
    acc = tl.zeros((AT_ONCE, 16, 8), tl.float32)
    up_acc = tl.zeros((AT_ONCE, 16, 8), tl.float32)
    start = tl.zeros((AT_ONCE, 16, 8), tl.float32)
    for turn in tl.static_range(TURNS):
        if turn + 1 < TURNS:
            next_codes = tl.load(at + (turn + 1) * AT_ONCE * 128, eviction_policy="evict_first")
            next_scales = _scales(scale, block + (turn + 1) * AT_ONCE, n, GS, ALL)
            if GATE:
                next_up_codes = tl.load(at + UP + (turn + 1) * AT_ONCE * 128, eviction_policy="evict_first")
                next_up_scales = _scales(scale + N, block + (turn + 1) * AT_ONCE, n, GS, ALL)
        given = _columns(x, block + turn * AT_ONCE, zero, kind, AT_ONCE, ASM)
        if RAW:
            start = tl.dot(tl.full((AT_ONCE, 16, 128), -raw_center(kind), kind), given)
        acc += _product(codes, given, start, scales, kind, WARPS, TILES, ASM, RAW)
        if GATE:
            up_acc += _product(up_codes, given, start, up_scales, kind, WARPS, TILES, ASM, RAW)
        if turn + 1 < TURNS:
            codes, scales = next_codes, next_scales
            if GATE:
                up_codes, up_scales = next_up_codes, next_up_scales
    result = tl.sum(tl.max(acc, 2), 0)
    out_kind = out.dtype.element_ty
    if BIAS:
        result += tl.load(bias + n).to(tl.float32)
    result = result.to(out_kind).to(tl.float32)
    if GATE:
        up = tl.sum(tl.max(up_acc, 2), 0)
        if BIAS:
            up += tl.load(bias + N + n).to(tl.float32)
        result = gated(result, up.to(out_kind).to(tl.float32), out_kind, GATE)
    if ADD:
        result += tl.load(out + n).to(tl.float32)
    tl.store(out + n, result.to(out_kind))


@dataclass(frozen=True, slots=True)
class RowTiling:
    warps: int
    tiles: int = 1  # that a warp takes at a time
    raw: bool = False  # the center of codes is subtracted from sums
    fetch: bool = True  # everything is fetched before the kernel in front has ended
    registers: int | None = None  # of a thread, at most


def can_multiply(weight: TritonLowBit, n: int) -> bool:
    plain = weight.bits == 4 and weight.table is None and weight.order is None and weight.offsets == NO_OFFSETS.value
    return plain and weight.group_size % 128 == 0 and weight.columns % 128 == 0 and n % 16 == 0


def multiply_row(
    x: Tensor, weight: TritonLowBit, out: Tensor, bias: Tensor | None, gate: str | None, add: bool, tiling: RowTiling
) -> None:
    n, k = out.shape[1], weight.columns
    assert k // 128 % (tiling.warps * tiling.tiles) == 0
    dependent = dependent_launch(1)
    asm = generation_of(x)
    row_product[(n // 16,)](
        x, weight.words, weight.scale, x if bias is None else bias, out, N=n, K=k, GS=weight.group_size,
        WARPS=tiling.warps, TILES=tiling.tiles, GATE=GATES.index(gate), ADD=add, BIAS=bias is not None,
        ASM=asm, RAW=tiling.raw and asm > 0, FETCH=tiling.fetch, DEPENDENT=dependent, num_warps=tiling.warps,
        maxnreg=tiling.registers, launch_pdl=dependent,
    )  # fmt: skip
