# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Matrix products in few bits of at most 64 rows, where reading the weight is what takes the time.

Codes become numbers in registers, where tensor cores take them from; scales are applied to the sum of a group. Where
there are fewer tiles than processors have room for, several programs share one along the inner dimension, and the last
of them to finish adds the parts up in order. Of a single row norm, gate, bias and addition are done here, too.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.triton.gemv import GATES, gated, normalised
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before
from text_generation_inference.kernels.triton.low_bit_codes import TritonLowBit, rows_at, unpack

MAX_ROWS = 64


@triton.jit
def spread(groups, first, n, N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """Of the columns from `first` on the scales (or offsets) of their groups, `[BK, BN]`."""
    if BK % GS == 0:
        group = first // GS + tl.arange(0, BK // GS)
        last: tl.constexpr = (K - 1) // GS
        found = tl.load(groups + tl.minimum(group, last)[:, None] * N + n[None, :]).to(tl.float32)
        return tl.reshape(tl.broadcast_to(found[:, None, :], (BK // GS, GS, BN)), (BK, BN))
    else:
        k = tl.minimum(first + tl.arange(0, BK), K - 1)
        return tl.load(groups + (k // GS)[:, None] * N + n[None, :]).to(tl.float32)


@triton.jit
def add_tile(
    acc, rows, words, scale, offset, at_scale, at_offset, table, first, n,
    N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, OFFSET: tl.constexpr, SPREAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc `[BM, BN]` and rows `[BM, BK]` times the columns from `first` on, of which `words` are the codes.

    `scale` and `offset` are those of the columns' group; SPREAD: there are several, and they are read at `at_scale`.
    """
    kind = rows.dtype
    precision: tl.constexpr = "ieee" if rows.dtype == tl.float32 else "tf32"
    if SPREAD:
        tile = unpack(words, table, BN, BITS, TABLE, tl.float32, ASM) * spread(at_scale, first, n, N, K, GS, BK, BN)
        if OFFSET:
            tile -= spread(at_offset, first, n, N, K, GS, BK, BN)
        return tl.dot(rows, tile.to(kind), acc, input_precision=precision)
    else:
        tile = unpack(words, table, BN, BITS, TABLE, kind, ASM)
        acc += tl.dot(rows, tile, input_precision=precision) * scale[None, :]
        if OFFSET:
            total = tl.dot(rows, tl.full((BK, 16), 1.0, kind), input_precision=precision)
            acc -= tl.max(total, 1)[:, None] * offset[None, :]
        return acc


@triton.jit
def group_values(at, group, n, last: tl.constexpr, N: tl.constexpr, NEEDED: tl.constexpr):
    """Scales or offsets of one group, `[BN]`."""
    if NEEDED:
        return tl.load(at + tl.minimum(group, last) * N + n).to(tl.float32)
    else:
        return tl.zeros_like(n).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _small_gemm_kernel(
    x, words, scale, offset, table, order, norm_weight, bias, out, partial, counters, eps, x_row, out_row, rows,
    N: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, GS: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr,
    ORDER: tl.constexpr, SPREAD: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN outputs of all rows, over one of SPLITS parts of K. GATE: the matrix holds N gates, then N values.

    ONE: there is one row; then NORM and ORDER are possible. SPREAD: groups end within tiles of columns.
    """
    BK: tl.constexpr = 512 // BITS
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    ALL: tl.constexpr = 2 * N if GATE else N
    LAST: tl.constexpr = (K - 1) // GS
    WHOLE: tl.constexpr = K % BK == 0
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    PART: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    start = split * PART
    end = tl.minimum(start + PART, BLOCKS)
    # Past the end the last row is read again: what comes of it is not stored.
    n_read = tl.minimum(n, N - 1)
    at = rows_at(words, n_read, BLOCKS)
    up_at = rows_at(words, n_read + N, BLOCKS)
    scales = group_values(scale, start * BK // GS, n_read, LAST, ALL, not SPREAD)
    offsets = group_values(offset, start * BK // GS, n_read, LAST, ALL, OFFSET and not SPREAD)
    up_scales = group_values(scale + N, start * BK // GS, n_read, LAST, ALL, GATE and not SPREAD)
    up_offsets = group_values(offset + N, start * BK // GS, n_read, LAST, ALL, GATE and OFFSET and not SPREAD)
    wait_for_kernel_before(DEPENDENT)
    if NORM:
        whole = tl.arange(0, K_PAD)
        row = tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(row * row, 0) / K + eps)
    x_at = x + tl.minimum(m, rows - 1)[:, None] * x_row + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    up_acc = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(start, end, num_stages=STAGES):
        first = block * BK
        inside = first + k < K
        codes = tl.load(at + block * 128, eviction_policy="evict_first")
        if ONE:
            if ORDER:
                columns = tl.load(order + first + k, mask=inside, other=0)
            else:
                columns = first + k
            if WHOLE:
                values = tl.load(x + columns)
            else:
                values = tl.load(x + columns, mask=inside, other=0.0)
            if NORM:
                values = normalised(values.to(tl.float32), norm_weight + columns, factor, inside, x.dtype.element_ty)
            given = tl.broadcast_to(values.to(x.dtype.element_ty)[None, :], (BM, BK))
        else:
            if WHOLE:
                given = tl.load(x_at + first)
            else:
                given = tl.load(x_at + first, mask=inside[None, :], other=0.0)
        acc = add_tile(
            acc, given, codes, scales, offsets, scale, offset, table, first, n_read, ALL, K, GS, BK, BN, BITS, TABLE,
            OFFSET, SPREAD, ASM,
        )  # fmt: skip
        # Those of the next tile come while this one is multiplied.
        group = (first + BK) // GS
        scales = group_values(scale, group, n_read, LAST, ALL, not SPREAD)
        offsets = group_values(offset, group, n_read, LAST, ALL, OFFSET and not SPREAD)
        if GATE:
            codes = tl.load(up_at + block * 128, eviction_policy="evict_first")
            up_acc = add_tile(
                up_acc, given, codes, up_scales, up_offsets, scale + N, offset + N, table, first, n_read, ALL, K, GS,
                BK, BN, BITS, TABLE, OFFSET, SPREAD, ASM,
            )  # fmt: skip
            up_scales = group_values(scale + N, group, n_read, LAST, ALL, not SPREAD)
            up_offsets = group_values(offset + N, group, n_read, LAST, ALL, OFFSET and not SPREAD)
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
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if done == SPLITS - 1:
            tl.debug_barrier()
            acc = tl.zeros((BM, BN), tl.float32)
            up_acc = tl.zeros((BM, BN), tl.float32)
            for other in range(0, SPLITS):
                there = partial + other * (PARTS * size) + part_at
                acc += tl.load(there, mask=here, other=0.0, cache_modifier=".cg")
                if GATE:
                    up_acc += tl.load(there + size, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
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
class Tiling:
    bn: int  # outputs of a program
    splits: int
    stages: int
    warps: int = 4


def choose_tiling(rows: int, n: int, blocks: int, gate: bool, num_processors: int, roomy: bool = True) -> Tiling:
    """For `n` outputs of rows of so many tiles. Measured on an H200, see `bench/cuda_low_bit.py`."""
    tiles = triton.cdiv(n, 64)
    each = 4 if rows <= 16 and roomy else 2
    splits = 1
    while tiles * splits * 2 <= each * num_processors and blocks >= 8 * splits:
        splits *= 2
    return Tiling(64, splits, (3 if gate or rows > 32 else 4) if roomy else 2)


class SmallGemmLowBit:
    """The op, with the buffers where parts meet. `roomy`: a processor has more shared memory than 100 KB."""

    def __init__(self, num_processors: int, roomy: bool = True) -> None:
        self._num_processors, self._roomy = num_processors, roomy
        self._partial: Tensor | None = None
        self._counters: Tensor | None = None
        self._outgrown: list[Tensor] = []  # captured steps still use them

    def __call__(
        self,
        x: Tensor,  # [rows, in]; in 16 bits
        weight: TritonLowBit,  # [out, in], or [2 * out, in] with a gate
        out: Tensor,  # [rows, out]
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,  # of one row: weight and epsilon
        gate: str | None = None,  # "silu" or "gelu_tanh"
        add: bool = False,  # to what is in out
        tiling: Tiling | None = None,
    ) -> None:
        rows, n = out.shape
        one = rows == 1
        assert one or norm is None
        if weight.order is not None and not one:
            x = x.index_select(1, weight.order)
        bm = max(16, triton.next_power_of_2(rows))
        blocks = triton.cdiv(weight.columns, weight.block)
        tiling = tiling or choose_tiling(rows, n, blocks, gate is not None, self._num_processors, self._roomy)
        splits = triton.cdiv(blocks, triton.cdiv(blocks, tiling.splits))  # none without a tile
        tiles = triton.cdiv(n, tiling.bn)
        room = tiles * tiling.bn * rows * splits * (2 if gate else 1)
        partial, counters = self._take(out.device, room if splits > 1 else 1, tiles)
        dependent = dependent_launch(rows)
        _small_gemm_kernel[(tiles, splits)](
            x, weight.words, weight.scale, weight.scale if weight.offset is None else weight.offset,
            weight.scale if weight.table is None else weight.table,
            weight.words if weight.order is None else weight.order, norm[0] if norm else x,
            x if bias is None else bias, out, partial, counters, norm[1] if norm else 0.0,
            x.stride(0), out.stride(0), rows, N=n, K=weight.columns, K_PAD=triton.next_power_of_2(weight.columns),
            GS=weight.group_size, BITS=weight.bits, BM=bm, BN=tiling.bn, SPLITS=splits, STAGES=tiling.stages, ONE=one,
            NORM=norm is not None, GATE=GATES.index(gate), ADD=add, BIAS=bias is not None,
            TABLE=weight.table is not None, OFFSET=weight.offset is not None, ORDER=one and weight.order is not None,
            SPREAD=weight.spreads, ASM=x.is_cuda, DEPENDENT=dependent, num_warps=tiling.warps, launch_pdl=dependent,
        )  # fmt: skip

    def _take(self, device: torch.device, num_partial: int, num_tiles: int) -> tuple[Tensor, Tensor]:
        if self._partial is None or self._partial.numel() < num_partial:
            self._outgrown += [] if self._partial is None else [self._partial]
            self._partial = torch.empty(num_partial, dtype=torch.float32, device=device)
        if self._counters is None or self._counters.numel() < num_tiles:
            self._outgrown += [] if self._counters is None else [self._counters]
            self._counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        return self._partial, self._counters
