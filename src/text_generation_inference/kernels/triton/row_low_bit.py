# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201, RUF005
"""The product of a single row with a matrix in 4 bits, with zero points or without, on GPUs from capability 9.0 on.

A program makes 16 outputs, its warps share the columns: each takes every so-manieth tile of codes, straight into
registers and before the kernel in front has ended. The warps' sums meet once, at the end; nothing else goes from warp
to warp, and no program waits for another one. Zero points are what is taken from codes as they become numbers, in
place of their center: each thread reads those of its own codes.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.triton.gemv import GATES, gated
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before
from text_generation_inference.kernels.triton.low_bit_codes import (
    CROSSED,
    OFFSETS,
    ZERO_POINTS,
    TritonLowBit,
    generation_of,
    unpack,
)

_MOST_TURNS = 16  # they are written out one after the other


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
def _product(
    codes, zeros, given, scales, kind: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, ZEROS: tl.constexpr, ASM
):  # fmt: skip
    """`[TILES * WARPS, 16, 8]`: of each tile 16 outputs, eight times the same."""
    tile = unpack(codes, zeros, codes, 16 * TILES * WARPS, 4, False, ZEROS, kind, ASM, CROSSED)
    apart = tl.permute(tl.reshape(tile, (128, TILES, 2, WARPS, 8)), (1, 3, 2, 4, 0))
    tile = tl.reshape(apart, (TILES * WARPS, 16, 128))
    return tl.dot(tile, given) * scales.to(tl.float32)[:, :, None]


@triton.jit
def _read(
    at, scale, offset, block, n, mine, row, turn,
    GS: tl.constexpr, ALL: tl.constexpr, AT_ONCE: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Codes of a turn `[16 * AT_ONCE, 16]`, scales of their groups `[AT_ONCE, 16]`, zero points `[16 * AT_ONCE]`."""
    codes = tl.load(at + turn * AT_ONCE * 128, eviction_policy="evict_first")
    scales = tl.load(scale + ((block + turn * AT_ONCE) * 128 // GS)[:, None] * ALL + n[None, :])
    if ZEROS:
        zeros_at = offset + (mine + turn * AT_ONCE) * 128 // GS * ALL + row
        if ASM:  # a load would have them go from thread to thread
            zeros = tl.inline_asm_elementwise(
                "ld.global.nc.u8 $0, [$1];", "=r,l", [zeros_at], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            zeros = tl.load(zeros_at)
    else:
        zeros = tl.zeros_like(row)
    return codes, scales, zeros


@triton.jit
def row_product(
    x, words, scale, offset, bias, out,
    N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """16 outputs. A warp takes TILES tiles of codes at a time. GATE: the matrix holds N gates, then N values.

    AHEAD: turns that are read before the first one is multiplied. ZEROS: `offset` are zero points.
    """
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
    ahead, up_ahead = (), ()
    for turn in tl.static_range(AHEAD):
        ahead = ahead + (_read(at, scale, offset, block, n, mine, row, turn, GS, ALL, AT_ONCE, ZEROS, ASM),)
        if GATE:
            up_ahead = up_ahead + (
                _read(at + UP, scale + N, offset + N, block, n, mine, row, turn, GS, ALL, AT_ONCE, ZEROS, ASM),
            )
    wait_for_kernel_before(DEPENDENT)
    zero = 0
    if ASM:  # keeps reading the row behind the wait
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [first], dtype=tl.int32, is_pure=False, pack=1)
    acc = tl.zeros((AT_ONCE, 16, 8), tl.float32)
    up_acc = tl.zeros((AT_ONCE, 16, 8), tl.float32)
    for turn in tl.static_range(TURNS):
        codes, scales, zeros = ahead[0]
        ahead = ahead[1:]
        if turn + AHEAD < TURNS:
            ahead = ahead + (_read(at, scale, offset, block, n, mine, row, turn + AHEAD, GS, ALL, AT_ONCE, ZEROS, ASM),)
        given = _columns(x, block + turn * AT_ONCE, zero, kind, AT_ONCE, ASM)
        acc += _product(codes, zeros, given, scales, kind, WARPS, TILES, ZEROS, ASM)
        if GATE:
            codes, scales, zeros = up_ahead[0]
            up_ahead = up_ahead[1:]
            if turn + AHEAD < TURNS:
                up_ahead = up_ahead + (
                    _read(
                        at + UP, scale + N, offset + N, block, n, mine, row, turn + AHEAD, GS, ALL, AT_ONCE, ZEROS, ASM
                    ),
                )
            up_acc += _product(codes, zeros, given, scales, kind, WARPS, TILES, ZEROS, ASM)
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
    registers: int | None = None  # of a thread, at most
    ahead: int = 1  # turns that are read before the first one is multiplied


def choose_row_tiling(x: Tensor, weight: TritonLowBit, n: int, is_gated: bool, num_processors: int) -> RowTiling | None:
    """None where another kernel is needed, or is faster."""
    fits = weight.bits == 4 and weight.table is None and weight.order is None and weight.offsets != OFFSETS.value
    fits = fits and weight.group_size % 128 == 0 and weight.columns % 128 == 0 and n % 16 == 0
    if not fits or x.data_ptr() % 8:
        return None
    return choose_warps(n, weight.columns // 128, is_gated, weight.offset is not None, num_processors)


def choose_warps(n: int, blocks: int, is_gated: bool, zeros: bool, num_processors: int) -> RowTiling | None:
    """For rows of so many tiles: all of them at once, or one by one. Measured on an H200: `bench/cuda_low_bit.py`.

    `zeros`: with zero points. Then all tiles are read at once, too, and multiplied one by one: numbers that wait to be
    multiplied would take more registers than there are.
    """
    if n // 16 < num_processors:  # some would be idle, where the other kernel shares columns among them
        return None
    few_programs = n // 16 <= 2 * num_processors
    warps = 16 if blocks % 16 == 0 and (few_programs or blocks > 32) else 8
    turns = blocks // warps
    if blocks in (8, 16, 32):
        # Gates and ups have 64 registers of codes: without a bound there is room for one program on a processor.
        registers = 128 if is_gated and warps * turns == 32 else None
        return RowTiling(warps, 1, registers, turns) if zeros else RowTiling(warps, turns, registers)
    if blocks % warps or turns > _MOST_TURNS or is_gated:  # gates: as fast in the other kernel
        return None
    # With more of them there would be no room for two programs of 16 warps on a processor.
    return RowTiling(warps, registers=64 if zeros and warps == 16 else None)


def multiply_row(
    x: Tensor, weight: TritonLowBit, out: Tensor, bias: Tensor | None, gate: str | None, add: bool, tiling: RowTiling
) -> None:
    n, k = out.shape[1], weight.columns
    turns, rest = divmod(k // 128, tiling.warps * tiling.tiles)
    assert not rest and 0 < tiling.ahead <= turns
    dependent = dependent_launch(1)
    row_product[(n // 16,)](
        x, weight.words, weight.scale, weight.scale if weight.offset is None else weight.offset,
        x if bias is None else bias, out, N=n, K=k, GS=weight.group_size, WARPS=tiling.warps, TILES=tiling.tiles,
        AHEAD=tiling.ahead, GATE=GATES.index(gate), ADD=add, BIAS=bias is not None,
        ZEROS=weight.offsets == ZERO_POINTS.value, ASM=generation_of(x), DEPENDENT=dependent, num_warps=tiling.warps,
        maxnreg=tiling.registers, launch_pdl=dependent,
    )  # fmt: skip
