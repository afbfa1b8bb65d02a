# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Matrix products in few bits of few rows, where reading the weight is what takes the time.

Codes become numbers in registers, where tensor cores take them from; scales are applied to the sum of a group. Where
there are fewer tiles than processors have room for, several programs share one along the inner dimension, and the last
of them to finish adds the parts up in order. Of a single row gate, bias and addition are done here, too; most matrices
in 4 bits have a kernel of their own for it (`row_low_bit`).
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.triton.gemv import GATES, gated
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before
from text_generation_inference.kernels.triton.low_bit_codes import (
    NATURAL,
    NUMBERS,
    OFFSETS,
    PAIRED,
    ZERO_POINTS,
    TritonLowBit,
    generation_of,
    lookup_of,
    rows_at,
    unpack,
)
from text_generation_inference.kernels.triton.norms_rotary import rms_norm
from text_generation_inference.kernels.triton.row_low_bit import RowTiling, choose_row_tiling, multiply_row

MAX_ROWS, MAX_ROWS_ON_HOPPER = 64, 512  # beyond, the library is faster with the matrix widened


@triton.jit
def spread(
    groups, first, n, N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    kind: tl.constexpr = tl.float32,
):  # fmt: skip
    """Of the columns from `first` on the scales (or offsets) of their groups, `[BK, BN]`."""
    if BK % GS == 0:
        group = first // GS + tl.arange(0, BK // GS)
        last: tl.constexpr = (K - 1) // GS
        found = tl.load(groups + tl.minimum(group, last)[:, None] * N + n[None, :]).to(kind)
        return tl.reshape(tl.broadcast_to(found[:, None, :], (BK // GS, GS, BN)), (BK, BN))
    else:
        k = tl.minimum(first + tl.arange(0, BK), K - 1)
        return tl.load(groups + (k // GS)[:, None] * N + n[None, :]).to(kind)


@triton.jit
def turned(tile, BK: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """`[BK, BN]` -> `[BN, BK]`, whose rows are those that `turned_rows` says: each thread keeps what it has."""
    apart = tl.reshape(tile, (BK, BN // (16 * WARPS), 2, WARPS, 8))
    return tl.reshape(tl.permute(apart, (1, 3, 2, 4, 0)), (BN, BK))


@triton.jit
def turned_rows(BN: tl.constexpr, WARPS: tl.constexpr):
    """Which row of the left operand each row of a tile of words becomes: 16 successive ones are those of a warp."""
    row = tl.arange(0, BN)
    return row % 8 + row // (8 * WARPS) % 2 * 8 + row // 8 % WARPS * 16 + row // (16 * WARPS) * (16 * WARPS)


@triton.jit
def paired_columns(BK: tl.constexpr):
    """Which column each place of a tile of PAIRED numbers is of: pairs that a thread has lie 8 apart."""
    k = tl.arange(0, BK)
    column = k // 16 * 16 + k // 2 % 4 * 4 + k // 8 % 2 * 2 + k % 2
    return tl.max_contiguous(tl.multiple_of(column, 2), 2)


@triton.jit
def add_tile(
    acc, rows, words, scale, offset, at_scale, at_offset, table, first, n,
    N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, OFFSET: tl.constexpr, SPREAD: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
    WARPS: tl.constexpr = 1, COLUMNS: tl.constexpr = 0,
):  # fmt: skip
    """acc `[BM, BN]` and rows `[BM, BK]` times the columns from `first` on, of which `words` are the codes.

    `scale` and `offset` are those of the columns' group; SPREAD: there are several, and they are read at `at_scale`.
    OFFSET: ZERO_POINTS are those of the rows of `words`.
    SWAP: the matrix is the left operand, acc is `[BN, BM]`, and `words` are those of `turned_rows`.
    COLUMNS: their order.
    """
    kind = rows.dtype
    precision: tl.constexpr = "ieee" if rows.dtype == tl.float32 else "tf32"
    ZEROS: tl.constexpr = OFFSET == ZERO_POINTS
    if SPREAD:
        # Codes less their center and floats of 4 bits are exact in any type. Their products with scales of the same
        # type are rounded once, in it or in float32.
        EXACT: tl.constexpr = kind if TABLE != NUMBERS else tl.float32
        SAME: tl.constexpr = at_scale.dtype.element_ty == EXACT and OFFSET != OFFSETS
        WIDTH: tl.constexpr = kind if SAME else tl.float32
        tile = unpack(words, offset, table, BN, BITS, TABLE, ZEROS, EXACT, ASM, COLUMNS).to(WIDTH)
        tile *= spread(at_scale, first, n, N, K, GS, BK, BN, WIDTH)
        if OFFSET == OFFSETS:
            tile -= spread(at_offset, first, n, N, K, GS, BK, BN)
        if SWAP:
            return tl.dot(turned(tile.to(kind), BK, BN, WARPS), tl.trans(rows), acc, input_precision=precision)
        else:
            return tl.dot(rows, tile.to(kind), acc, input_precision=precision)
    elif SWAP:
        tile = turned(unpack(words, offset, table, BN, BITS, TABLE, ZEROS, kind, ASM, COLUMNS), BK, BN, WARPS)
        given = tl.trans(rows)
        acc += tl.dot(tile, given, input_precision=precision) * scale.to(tl.float32)[:, None]
        if OFFSET == OFFSETS:  # the sum of the columns is a product, too: nothing goes from thread to thread
            acc -= tl.dot(tl.full((BN, BK), 1.0, kind), given, input_precision=precision) * offset[:, None]
        return acc
    else:
        tile = unpack(words, offset, table, BN, BITS, TABLE, ZEROS, kind, ASM, COLUMNS)
        acc += tl.dot(rows, tile, input_precision=precision) * scale.to(tl.float32)[None, :]
        if OFFSET == OFFSETS:
            total = tl.dot(rows, tl.full((BK, 16), 1.0, kind), input_precision=precision)
            acc -= tl.max(total, 1)[:, None] * offset[None, :]
        return acc


@triton.jit
def group_values(at, group, n, last: tl.constexpr, N: tl.constexpr, NEEDED: tl.constexpr):
    """Scales or offsets of one group, `[BN]`, as they are: whoever makes numbers of them waits for them."""
    if NEEDED:
        return tl.load(at + tl.minimum(group, last) * N + n)
    else:
        return tl.zeros_like(n)


@triton.jit
def _fetch_ahead(words, row, block, BLOCKS: tl.constexpr, BN: tl.constexpr, COUNT: tl.constexpr):
    """Have the first tiles of a program in the cache of the chip when it may start to compute."""
    line = tl.arange(0, COUNT * 4)  # of 128 bytes; a tile has four
    tile = row // 8 + tl.arange(0, BN // 8)
    at = words + (tile[:, None].to(tl.int64) * BLOCKS + block) * 128 + line[None, :] * 32
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_groups(
    at, group, n, last: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, BN: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Have scales (or offsets) of so many groups in the cache of the chip: each is read once, and waited for."""
    LINE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth  # values in 128 bytes
    LINES: tl.constexpr = (BN + LINE - 1) // LINE
    groups = tl.minimum(group + tl.arange(0, COUNT), last)
    places = n + tl.arange(0, LINES) * LINE
    pointers = at + groups[:, None] * ALL + tl.minimum(places, N - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _part_of_row(x, order, first, K: tl.constexpr, BK: tl.constexpr, ORDER: tl.constexpr):
    """Columns from `first` on of a single row."""
    columns = first + tl.arange(0, BK)
    inside = columns < K
    if ORDER:
        columns = tl.load(order + columns, mask=inside, other=0)
    return tl.load(x + columns, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _small_gemm_kernel(
    x, words, scale, offset, table, order, bias, out, partial, counters, x_row, out_row, rows,
    N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, ONE: tl.constexpr,
    IN_PAIRS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr,
    OFFSET: tl.constexpr, ORDER: tl.constexpr, SPREAD: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
    DEPENDENT: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM rows, over one of SPLITS parts of K. GATE: the matrix holds N gates, then N values.

    ONE: there is one row; then ORDER is possible, and without it IN_PAIRS: it is read as pairs of numbers.
    SPREAD: numbers are scaled before they are multiplied. SWAP: the matrix is the left operand.
    """
    BK: tl.constexpr = 512 // BITS
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    ALL: tl.constexpr = 2 * N if GATE else N
    LAST: tl.constexpr = (K - 1) // GS
    WHOLE: tl.constexpr = K % BK == 0
    table = lookup_of(table, TABLE, ASM)
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    if COLUMNS == PAIRED:
        k = paired_columns(BK)
    else:
        k = tl.arange(0, BK)
    PART: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    start = split * PART
    end = tl.minimum(start + PART, BLOCKS)
    # Past the end the last row is read again: what comes of it is not stored.
    n_read = tl.minimum(n, N - 1)
    if SWAP:
        n_words = tl.minimum(tile * BN + turned_rows(BN, WARPS), N - 1)
    else:
        n_words = n_read
    at = rows_at(words, n_words, BLOCKS)
    up_at = rows_at(words, n_words + N, BLOCKS)
    scales = group_values(scale, start * BK // GS, n_read, LAST, ALL, not SPREAD)
    NOW: tl.constexpr = OFFSET == ZERO_POINTS or (OFFSET == OFFSETS and not SPREAD)
    n_offset = n_words if OFFSET == ZERO_POINTS else n_read
    offsets = group_values(offset, start * BK // GS, n_offset, LAST, ALL, NOW)
    up_scales = group_values(scale + N, start * BK // GS, n_read, LAST, ALL, GATE and not SPREAD)
    up_offsets = group_values(offset + N, start * BK // GS, n_offset, LAST, ALL, GATE and NOW)
    if ASM:
        COUNT: tl.constexpr = triton.next_power_of_2((PART * BK + GS - 1) // GS + 1)
        fetch_groups(scale, start * BK // GS, tile * BN, LAST, N, ALL, BN, COUNT)
        if OFFSET:
            fetch_groups(offset, start * BK // GS, tile * BN, LAST, N, ALL, BN, COUNT)
        if GATE:
            fetch_groups(scale + N, start * BK // GS, tile * BN, LAST, N, ALL, BN, COUNT)
            if OFFSET:
                fetch_groups(offset + N, start * BK // GS, tile * BN, LAST, N, ALL, BN, COUNT)
    if DEPENDENT and ASM:
        AHEAD: tl.constexpr = 4 if PART >= 4 else 1
        if tile * BN + BN <= N:
            block = tl.minimum(start, BLOCKS - AHEAD)
            _fetch_ahead(words, tile * BN, block, BLOCKS, BN, AHEAD)
            if GATE:
                _fetch_ahead(words, tile * BN + N, block, BLOCKS, BN, AHEAD)
    wait_for_kernel_before(DEPENDENT)
    x_at = x + tl.minimum(m, rows - 1)[:, None] * x_row + k[None, :]
    SHAPE_0: tl.constexpr = BN if SWAP else BM
    SHAPE_1: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    up_acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    # Pairs are read as far ahead of the loop as codes are, single numbers one tile ahead.
    if ONE and not IN_PAIRS:
        values = _part_of_row(x, order, start * BK, K, BK, ORDER)
    for block in tl.range(start, end, num_stages=STAGES, loop_unroll_factor=UNROLL):
        first = block * BK
        codes = tl.load(at + block * 128, eviction_policy="evict_first")
        if IN_PAIRS:
            pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + first // 2 + tl.arange(0, BK // 2))
            low = pairs.to(tl.int16).to(x.dtype.element_ty, bitcast=True)
            high = (pairs >> 16).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
            given = tl.broadcast_to(tl.reshape(tl.join(low, high), (BK,))[None, :], (BM, BK))
        elif ONE:
            given = tl.broadcast_to(values[None, :], (BM, BK))
        elif WHOLE:
            given = tl.load(x_at + first)
        else:
            given = tl.load(x_at + first, mask=(first + k < K)[None, :], other=0.0)
        acc = add_tile(
            acc, given, codes, scales, offsets, scale, offset, table, first, n_words, ALL, K, GS, BK, BN, BITS, TABLE,
            OFFSET, SPREAD, SWAP, ASM, WARPS, COLUMNS,
        )  # fmt: skip
        # Those of the next tile come while this one is multiplied.
        if ONE and not IN_PAIRS:
            values = _part_of_row(x, order, first + BK, K, BK, ORDER)
        group = (first + BK) // GS
        scales = group_values(scale, group, n_read, LAST, ALL, not SPREAD)
        offsets = group_values(offset, group, n_offset, LAST, ALL, NOW)
        if GATE:
            codes = tl.load(up_at + block * 128, eviction_policy="evict_first")
            up_acc = add_tile(
                up_acc, given, codes, up_scales, up_offsets, scale + N, offset + N, table, first, n_words, ALL, K, GS,
                BK, BN, BITS, TABLE, OFFSET, SPREAD, SWAP, ASM, WARPS, COLUMNS,
            )  # fmt: skip
            up_scales = group_values(scale + N, group, n_read, LAST, ALL, not SPREAD)
            up_offsets = group_values(offset + N, group, n_offset, LAST, ALL, NOW)
    if SWAP:
        acc = tl.trans(acc)
        if GATE:
            up_acc = tl.trans(up_acc)
        else:
            up_acc = acc
    if SPLITS > 1:
        here = m[:, None] < rows
        part_at = m[:, None] * (tl.num_programs(0) * BN) + n[None, :]
        size = rows * (tl.num_programs(0) * BN)
        PARTS: tl.constexpr = 2 if GATE else 1
        mine = partial + split.to(tl.int64) * (PARTS * size)
        tl.store(mine + part_at, acc, mask=here)
        if GATE:
            tl.store(mine + size + part_at, up_acc, mask=here)
        tl.debug_barrier()
        counter = counters + tl.program_id(2) * tl.num_programs(0) + tile
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if done == SPLITS - 1:
            tl.debug_barrier()
            acc = tl.zeros((BM, BN), tl.float32)
            up_acc = tl.zeros((BM, BN), tl.float32)
            for other in range(0, SPLITS):
                there = partial + other * (PARTS * size) + part_at
                acc += tl.load(there, mask=here, other=0.0, cache_modifier=".cg")
                if GATE:
                    up_acc += tl.load(there + size, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
            _finish(acc, up_acc, bias, out, out_row, rows, n, m, N, GATE, ADD, BIAS)
    else:
        _finish(acc, up_acc, bias, out, out_row, rows, n, m, N, GATE, ADD, BIAS)


@triton.jit
def _finish(
    acc, up_acc, bias, out, out_row, rows, n, m, N: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    kind = out.dtype.element_ty
    at = out + m[:, None] * out_row + n[None, :]
    here = (m < rows)[:, None] & (n < N)[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    result = acc.to(kind).to(tl.float32)
    if GATE:
        if BIAS:
            up_acc += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        result = gated(result, up_acc.to(kind).to(tl.float32), kind, GATE)
    if ADD:
        result += tl.load(at, mask=here, other=0.0).to(tl.float32)
    tl.store(at, result.to(kind), mask=here)


@dataclass(frozen=True, slots=True)
class LowBitGemmTiling:
    bm: int  # rows of a program
    bn: int  # outputs of a program
    splits: int
    stages: int
    warps: int = 4
    swap: bool = False  # the matrix is the left operand; then there are 16 outputs for each warp, or 32, 48...
    unroll: int = 1  # tiles of codes between two waits of a program's warps for each other
    paired: bool = False  # columns in the order in which tensor cores of capability 9.0 take them from registers


def _split(tiles: int, blocks: int, shortest: int, most: float) -> int:
    """Programs that share a tile of outputs: at most `most` for all tiles, of `shortest` tiles of columns at least."""
    splits = 1
    while tiles * splits * 2 <= most and blocks >= 2 * shortest * splits:
        splits *= 2
    return splits


def _choose_wide(rows: int, n: int, blocks: int, num_processors: int) -> LowBitGemmTiling | None:
    """Of 9 to 64 rows on Hopper: programs of many outputs read rows less often. None where processors would be idle.

    Columns are paired, so that numbers do not go from thread to thread on their way to the tensor cores.
    """
    if rows > 32:
        tiles = triton.cdiv(n, 256)
        waves = triton.cdiv(tiles, num_processors)  # a processor has room for one
        return LowBitGemmTiling(64, 256, 1, 3, 8, True, paired=True) if tiles >= 0.8 * waves * num_processors else None
    if rows <= 16 and triton.cdiv(n, 64) >= 3 * num_processors:
        return LowBitGemmTiling(16, 64, 1, 3, 2, True)
    warps, shortest = (8, 4) if rows <= 16 else (4, 8)
    tiles = triton.cdiv(n, 128)
    splits = _split(tiles, blocks, shortest, 2 * num_processors)
    if tiles * splits < 1.5 * num_processors:
        return None
    return LowBitGemmTiling(16 if rows <= 16 else 32, 128, splits, 3, warps, True, paired=True)


def choose_tiling(
    rows: int,
    n: int,
    blocks: int,
    offset: bool,
    num_processors: int,
    roomy: bool = True,
    hopper: bool = False,
    plain: bool = False,
) -> LowBitGemmTiling:
    """For `n` outputs of rows of so many tiles. Measured on an H200, see `bench/cuda_low_bit.py`.

    `hopper`: tensor cores take left operands of 64 rows from registers, right ones from shared memory.
    `plain`: of 4 bits, with one scale for the columns of a tile and at most zero points, so that columns may be paired.
    """
    if hopper and plain and 8 < rows <= 64:
        wide = _choose_wide(rows, n, blocks, num_processors)
        if wide is not None:
            return wide
    each, shortest = 3, 8  # programs of a processor at most; tiles of a program that is split, at least
    if rows > 64 and hopper:
        tiling = LowBitGemmTiling(128, 64, 1, 3, 4, True)
    elif rows > 32 and hopper:
        tiling = LowBitGemmTiling(64, 64, 1, 3, 4, True)
    elif rows > 16 and hopper:
        tiling, each = LowBitGemmTiling(32, 64, 1, 3, 4, True, paired=plain), 7
    elif 8 < rows <= 16 and offset and roomy:
        tiling, each = LowBitGemmTiling(16, 64, 1, 3, 4, True, unroll=2), 7
    elif rows <= 32:  # without what only later tensor cores do
        tiling = LowBitGemmTiling(max(8, triton.next_power_of_2(rows)), 32, 1, 3, 2, True)
        each, shortest = 14 if roomy else 4, 4 if rows == 1 else 8
        if rows == 1 and roomy and 48 <= blocks < 96:
            tiling, each = replace(tiling, stages=2, unroll=2), 16
    else:
        tiling, each = LowBitGemmTiling(64, 64, 1, 4 if roomy else 3), 2
    tiles = triton.cdiv(n, tiling.bn) * triton.cdiv(rows, tiling.bm)
    splits = _split(tiles, blocks, shortest, each * num_processors)
    if 8 < rows <= 16 and tiling.bn == 32 and roomy and blocks >= 12 * splits:
        tiling = replace(tiling, unroll=2)
    return replace(tiling, splits=splits)


class SmallGemmLowBit:
    """The op, with the buffers where parts meet. `roomy`: a processor has more shared memory than 100 KB."""

    def __init__(self, num_processors: int, roomy: bool = True, hopper: bool = False) -> None:
        self._num_processors, self._roomy, self._hopper = num_processors, roomy, hopper
        self.max_rows = MAX_ROWS_ON_HOPPER if hopper else MAX_ROWS
        self._partial: Tensor | None = None
        self._counters: Tensor | None = None
        self._outgrown: list[Tensor] = []  # captured steps still use them

    def __call__(
        self,
        x: Tensor,  # [rows, in]; in 16 bits
        weight: TritonLowBit,  # [out, in], or [2 * out, in] with a gate
        out: Tensor,  # [rows, out]
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,  # of x, before it is multiplied: weight and epsilon
        gate: str | None = None,  # "silu" or "gelu_tanh"
        add: bool = False,  # to what is in out
        tiling: LowBitGemmTiling | RowTiling | None = None,
    ) -> None:
        rows, n = out.shape
        one = rows == 1
        if norm is not None:  # a kernel of its own: then a row is read straight into registers
            x = cast(Tensor, rms_norm(x, *norm))  # not quantised
        if weight.order is not None and not one:
            x = x.index_select(1, weight.order)
        if tiling is None and one and self._roomy:
            tiling = choose_row_tiling(x, weight, n, gate is not None, self._num_processors)
        if isinstance(tiling, RowTiling):
            multiply_row(x, weight, out, bias, gate, add, tiling)
            return
        blocks = triton.cdiv(weight.columns, weight.block)
        offset = weight.offsets == OFFSETS.value
        plain = weight.bits == 4 and weight.table is None and not weight.spreads and not offset
        tiling = tiling or choose_tiling(
            rows, n, blocks, offset, self._num_processors, self._roomy, self._hopper, plain
        )
        if weight.table is not None:  # what is looked up there takes room, too
            tiling = replace(tiling, stages=min(3, tiling.stages))
        assert not tiling.swap or tiling.bn % (16 * tiling.warps) == 0
        assert not tiling.paired or (weight.bits == 4 and weight.group_size % 16 == 0 and not one)
        splits = triton.cdiv(blocks, triton.cdiv(blocks, tiling.splits))  # none without a tile
        tiles, row_tiles = triton.cdiv(n, tiling.bn), triton.cdiv(rows, tiling.bm)
        room = tiles * tiling.bn * rows * splits * (2 if gate else 1)
        partial, counters = self._take(out.device, room if splits > 1 else 1, tiles * row_tiles)
        in_pairs = one and weight.order is None
        in_pairs = in_pairs and weight.columns % weight.block == 0 and x.data_ptr() % 4 == 0
        # There are no registers for the sums of a group beside those of all.
        scales_first = tiling.swap and tiling.bm > (64 if weight.offsets == OFFSETS.value else 128)
        if weight.spreads or scales_first:  # scales are read ahead as codes are, and take more room than those
            tiling = replace(tiling, stages=min(2, tiling.stages))
        dependent = dependent_launch(rows)
        _small_gemm_kernel[(tiles, splits, row_tiles)](
            x, weight.words, weight.scale, weight.scale if weight.offset is None else weight.offset,
            weight.scale if weight.table is None else weight.table,
            weight.words if weight.order is None else weight.order, x if bias is None else bias, out, partial,
            counters, x.stride(0), out.stride(0), rows, N=n, K=weight.columns, GS=weight.group_size, BITS=weight.bits,
            BM=tiling.bm, BN=tiling.bn, SPLITS=splits, STAGES=tiling.stages, UNROLL=tiling.unroll, ONE=one,
            IN_PAIRS=in_pairs, GATE=GATES.index(gate), ADD=add, BIAS=bias is not None,
            TABLE=weight.codes_are, OFFSET=weight.offsets, ORDER=one and weight.order is not None,
            SPREAD=weight.spreads or scales_first, SWAP=tiling.swap, ASM=generation_of(x),
            DEPENDENT=dependent, WARPS=tiling.warps, COLUMNS=(PAIRED if tiling.paired else NATURAL).value,
            num_warps=tiling.warps, launch_pdl=dependent,
        )  # fmt: skip

    def _take(self, device: torch.device, num_partial: int, num_tiles: int) -> tuple[Tensor, Tensor]:
        if self._partial is None or self._partial.numel() < num_partial:
            self._outgrown += [] if self._partial is None else [self._partial]
            self._partial = torch.empty(num_partial, dtype=torch.float32, device=device)
        if self._counters is None or self._counters.numel() < num_tiles:
            self._outgrown += [] if self._counters is None else [self._counters]
            self._counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        return self._partial, self._counters
