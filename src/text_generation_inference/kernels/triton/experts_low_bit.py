# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Products of the rows of each expert with that expert's matrix in few bits: `small_gemm_low_bit` for pairs.

Pairs are sorted by expert, in blocks of some; or there are so few that each is a block of its own (by pair), whose
programs find its expert themselves. Codes become numbers in registers, whatever the number of rows.
"""

from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.triton.grouped_products import gate_values
from text_generation_inference.kernels.triton.launch import wait_for_kernel_before
from text_generation_inference.kernels.triton.low_bit_codes import (
    OFFSETS,
    ZERO_POINTS,
    TritonLowBit,
    generation_of,
    lookup_of,
    rows_at,
)
from text_generation_inference.kernels.triton.small_gemm_low_bit import add_tile, group_values


@triton.jit(do_not_specialize=["pairs", "blocks"])
def grouped_low_bit(
    x, words, scale, offset, table, columns, bias, out, order, owners, total, x_row, columns_row, pairs, blocks,
    N: tl.constexpr, K: tl.constexpr, GS: tl.constexpr, BITS: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, GATE: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr,
    ORDER: tl.constexpr, SPREAD: tl.constexpr, BIAS: tl.constexpr, BY_PAIR: tl.constexpr, ASM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BM pairs of one expert times BN rows of its matrix. GATE: the matrix holds N gates, then N values.

    The row of a pair is `pair // TOP_K` of x, and `pair` of out. BY_PAIR: block and pair are the same, and `owners` are
    the experts of pairs. ORDER: `columns` says which input each column is for.
    """
    BK: tl.constexpr = 512 // BITS
    TILES: tl.constexpr = (K + BK - 1) // BK
    ALL: tl.constexpr = 2 * N if GATE else N
    LAST: tl.constexpr = (K - 1) // GS
    # Programs of the same outputs run side by side: those of one expert find its matrix in the cache.
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    table = lookup_of(table, TABLE, ASM)
    wait_for_kernel_before(DEPENDENT)
    m = tl.arange(0, BM)
    if BY_PAIR:
        pair = tl.where(m == 0, block, pairs)
    else:
        if block * BM >= tl.load(total):
            return
        pair = tl.load(order + block * BM + m)
    expert = tl.load(owners + block).to(tl.int64)
    live = pair < pairs
    row = tl.where(live, pair // TOP_K, block // TOP_K if BY_PAIR else 0).to(tl.int64)
    n = tile * BN + tl.arange(0, BN)
    n_read = tl.minimum(n, N - 1)
    k = tl.arange(0, BK)
    mine = words + expert * ((ALL + 7) // 8 * TILES * 128)
    at, up_at = rows_at(mine, n_read, TILES), rows_at(mine, n_read + N, TILES)
    scale += expert * ((LAST + 1) * ALL)
    offset += expert * ((LAST + 1) * ALL)
    columns += expert * columns_row
    scales = group_values(scale, 0, n_read, LAST, ALL, not SPREAD)
    NOW: tl.constexpr = OFFSET == ZERO_POINTS or (OFFSET == OFFSETS and not SPREAD)
    offsets = group_values(offset, 0, n_read, LAST, ALL, NOW)
    up_scales = group_values(scale + N, 0, n_read, LAST, ALL, GATE and not SPREAD)
    up_offsets = group_values(offset + N, 0, n_read, LAST, ALL, GATE and NOW)
    x_at = x + row[:, None] * x_row
    acc = tl.zeros((BM, BN), tl.float32)
    up_acc = tl.zeros((BM, BN), tl.float32)
    for block_k in tl.range(0, TILES, num_stages=STAGES):
        first = block_k * BK
        codes = tl.load(at + block_k * 128)
        inside = first + k < K
        if ORDER:
            inputs = tl.load(columns + first + k, mask=inside, other=0)
            rows = tl.load(x_at + inputs[None, :], mask=inside[None, :], other=0.0)
        else:
            if K % BK == 0:
                rows = tl.load(x_at + (first + k)[None, :])
            else:
                rows = tl.load(x_at + (first + k)[None, :], mask=inside[None, :], other=0.0)
        acc = add_tile(
            acc, rows, codes, scales, offsets, scale, offset, table, first, n_read, ALL, K, GS, BK, BN, BITS, TABLE,
            OFFSET, SPREAD, False, ASM,
        )  # fmt: skip
        group = (first + BK) // GS
        scales = group_values(scale, group, n_read, LAST, ALL, not SPREAD)
        offsets = group_values(offset, group, n_read, LAST, ALL, NOW)
        if GATE:
            codes = tl.load(up_at + block_k * 128)
            up_acc = add_tile(
                up_acc, rows, codes, up_scales, up_offsets, scale + N, offset + N, table, first, n_read, ALL, K, GS, BK,
                BN, BITS, TABLE, OFFSET, SPREAD, False, ASM,
            )  # fmt: skip
            up_scales = group_values(scale + N, group, n_read, LAST, ALL, not SPREAD)
            up_offsets = group_values(offset + N, group, n_read, LAST, ALL, NOW)
    kind = out.dtype.element_ty
    here = n < N
    if BIAS:
        acc += tl.load(bias + expert * ALL + n, mask=here, other=0.0).to(tl.float32)[None, :]
    result = acc.to(kind).to(tl.float32)
    if GATE:
        if BIAS:
            up_acc += tl.load(bias + expert * ALL + N + n, mask=here, other=0.0).to(tl.float32)[None, :]
        result = gate_values(result, up_acc.to(kind).to(tl.float32), kind, GATE)
    out_at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, result.to(kind), mask=live[:, None] & here[None, :])


class Blocks(Protocol):
    """Of pairs: `experts.Groups`, or pairs one by one."""

    order: Tensor
    owners: Tensor
    total: Tensor
    pairs: int
    blocks: int
    dependent: bool
    by_pair: bool


@dataclass(frozen=True, slots=True)
class LowBitTiling:
    bm: int
    bn: int = 64
    stages: int = 3
    warps: int = 4


def choose_tiling(pairs: int, num_experts: int, roomy: bool) -> LowBitTiling:
    """By the pairs that an expert gets on average."""
    each = pairs / num_experts
    bm = 16 if each <= 12 else 32 if each <= 40 else 64
    return LowBitTiling(bm, stages=3 if roomy else 2)


def multiply_pairs(
    blocks: Blocks, x: Tensor, weight: TritonLowBit, bias: Tensor | None, out: Tensor, tile: LowBitTiling, gate: int,
    per_row: int,
) -> None:  # fmt: skip
    """`per_row`: so many pairs in succession have the same row. `gate`: a place in `experts.GATES`."""
    n = out.shape[1]
    columns = weight.words if weight.order is None else weight.order
    grid = (blocks.blocks * triton.cdiv(n, tile.bn),)
    grouped_low_bit[grid](
        x, weight.words, weight.scale, weight.scale if weight.offset is None else weight.offset,
        weight.scale if weight.table is None else weight.table, columns, x if bias is None else bias, out,
        blocks.order, blocks.owners, blocks.total, x.stride(0),
        0 if weight.order is None or weight.order.dim() == 1 else weight.order.stride(0), blocks.pairs, blocks.blocks,
        N=n, K=weight.columns, GS=weight.group_size, BITS=weight.bits, TOP_K=per_row, BM=tile.bm, BN=tile.bn,
        STAGES=tile.stages, GATE=gate, TABLE=weight.codes_are, OFFSET=weight.offsets,
        ORDER=weight.order is not None, SPREAD=weight.spreads, BIAS=bias is not None, BY_PAIR=blocks.by_pair,
        ASM=generation_of(x), DEPENDENT=blocks.dependent, num_warps=tile.warps, launch_pdl=blocks.dependent,
    )  # fmt: skip
