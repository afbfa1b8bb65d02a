# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Products of the rows of each expert with that expert's matrix, for many rows: sorted by expert, then in tiles.

Nothing is read back: the grids are as large as they could ever have to be, and programs past the end return at once. A
row here is a pair of a token and one of its experts.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.gemv import gated
from text_generation_inference.kernels.triton.launch import wait_for_kernel_before
from text_generation_inference.kernels.triton.quantize import BY_ROW, BY_SQUARE, STATIC


@triton.jit
def gate_values(gate, up, kind: tl.constexpr, GATE: tl.constexpr):
    """1: silu, 2: gelu, 3: clamped. Rounded as the gates of `kernels.experts` round."""
    if GATE == 3:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return ((up + 1) * gate / (1 + tl.exp(-1.702 * gate))).to(kind).to(tl.float32)
    else:
        return gated(gate, up, kind, GATE)


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(
    ids, order, owners, total, pairs,
    E: tl.constexpr, BINS: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per expert: its pairs, in their order, go where those of the experts before it end.

    Each expert's part of `order` is filled up to a multiple of BM with `pairs`, which is no pair. `owners` says whose
    each block of BM is, `total` how many places are taken.
    """
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    wait_for_kernel_before(DEPENDENT)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, BLOCK):
        found = tl.load(ids + first + i, mask=first + i < pairs, other=E).to(tl.int32)
        counts += tl.histogram(found, BINS)
    padded = tl.where(bins < E, (counts + BM - 1) // BM * BM, 0)
    start = tl.sum(tl.where(bins < expert, padded, 0), 0)
    mine = tl.sum(tl.where(bins == expert, counts, 0), 0)
    room = tl.sum(tl.where(bins == expert, padded, 0), 0)
    at = start
    for first in range(0, pairs, BLOCK):
        found = tl.load(ids + first + i, mask=first + i < pairs, other=E).to(tl.int32)
        same = (found == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(same, 0) - 1, first + i, mask=found == expert)
        at += tl.sum(same, 0)
    lane = tl.arange(0, BM)
    tl.store(order + start + mine + lane, lane * 0 + pairs, mask=lane < room - mine)
    for block in range(0, room // BM):
        tl.store(owners + start // BM + block, expert)
    if expert == E - 1:
        tl.store(total, start + room)


@triton.jit
def _dot(rows, columns, acc, SWAP: tl.constexpr, EXACT: tl.constexpr):
    """SWAP: the matrix is the left operand, whose tile must be large where there are few rows."""
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    if SWAP:
        return tl.dot(columns, tl.trans(rows), acc, input_precision=precision)
    else:
        return tl.dot(rows, tl.trans(columns), acc, input_precision=precision)


@triton.jit
def _by_squares(rows, columns, acc, x_scale, w_scale, SWAP: tl.constexpr):
    """Of 128 columns of the inner dimension, which have scales of their own."""
    part = _dot(rows, columns, tl.zeros_like(acc), SWAP, False)
    if SWAP:
        return acc + part * (x_scale * w_scale)[None, :]
    else:
        return acc + part * (x_scale * w_scale)[:, None]


@triton.jit
def _finish(
    acc, x_scale, weight_scale, bias, row, first, n, inside, kind: tl.constexpr,
    FORM: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """-> `[BM, BN]`, rounded to the type of the result."""
    if SWAP:
        acc = tl.trans(acc)
    if (FORM == BY_ROW) | (FORM == STATIC):
        acc = acc * tl.load(x_scale + row)[:, None] * tl.load(weight_scale + first + n, mask=inside, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + first + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc.to(kind).to(tl.float32)


@triton.jit
def _load(weight, w_at, row, k0, inside_k, BULK: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a matrix that begins in `row`; BULK: brought by the copy engine, also what is behind its rows."""
    if BULK:
        return weight.load([row, k0])
    elif WHOLE:
        return tl.load(w_at + k0)
    else:
        return tl.load(w_at + k0, mask=inside_k, other=0.0)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def grouped_product(
    x, weight, bias, out, order, owners, total, x_scale, weight_scale, x_row, pairs, blocks, columns,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, GATE: tl.constexpr, FORM: tl.constexpr,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, BULK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BM pairs of one expert times BN rows of its matrix. GATE: the matrix holds N gates, then N values.

    BULK: `weight` is a descriptor of tiles of BN rows and BK columns.

    The row of a pair is `pair // TOP_K` of x, and `pair` of out. FORM: of the operands, see `quantize`; BY_SQUARE wants
    BK to be 128 and BN to divide it.
    """
    tiles = (N + BN - 1) // BN
    program = tl.program_id(0)
    # Programs of the same columns run one after the other for a group of blocks: they find the matrix in the cache.
    group = program // (GROUP * tiles)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    block = group * GROUP + (program % (GROUP * tiles)) % size
    tile = (program % (GROUP * tiles)) // size
    wait_for_kernel_before(DEPENDENT)
    if block * BM >= tl.load(total):
        return
    kind = out.dtype.element_ty
    ROWS: tl.constexpr = 2 * N if GATE else N
    EXACT: tl.constexpr = x.dtype.element_ty == tl.float32
    expert = tl.load(owners + block).to(tl.int64)
    pair = tl.load(order + block * BM + tl.arange(0, BM))
    live = pair < pairs
    row = tl.where(live, pair // TOP_K, 0).to(tl.int64)  # what comes of others is not stored
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = x + row[:, None] * x_row + k[None, :]
    w_row = (expert * ROWS + tile * BN).to(tl.int32)
    w_at, up_at = x_at, x_at
    if not BULK:
        w_at = weight + (expert * ROWS + tl.minimum(n, N - 1))[:, None] * K + k[None, :]
        up_at = w_at + N * K
    SHAPE_0: tl.constexpr = BN if SWAP else BM
    SHAPE_1: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((SHAPE_0, SHAPE_1), tl.float32)
    up_acc = acc
    SQUARES: tl.constexpr = (K + 127) // 128
    w_squares = weight_scale + (expert * ROWS + tile * BN) // 128 * SQUARES
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        inside_k = (k0 + k < columns)[None, :]
        if WHOLE:
            rows = tl.load(x_at + k0)
        else:
            rows = tl.load(x_at + k0, mask=inside_k, other=0.0)
        tile_w = _load(weight, w_at, w_row, k0, inside_k, BULK, WHOLE)
        if FORM == BY_SQUARE:
            x_square = tl.load(x_scale + row * SQUARES + k0 // 128)
            acc = _by_squares(rows, tile_w, acc, x_square, tl.load(w_squares + k0 // 128), SWAP)
        else:
            acc = _dot(rows, tile_w, acc, SWAP, EXACT)
        if GATE:
            tile_w = _load(weight, up_at, w_row + N, k0, inside_k, BULK, WHOLE)
            if FORM == BY_SQUARE:
                w_square = tl.load(w_squares + N // 128 * SQUARES + k0 // 128)
                up_acc = _by_squares(rows, tile_w, up_acc, x_square, w_square, SWAP)
            else:
                up_acc = _dot(rows, tile_w, up_acc, SWAP, EXACT)
    first = expert * ROWS
    inside = n < N
    result = _finish(acc, x_scale, weight_scale, bias, row, first, n, inside, kind, FORM, BIAS, SWAP)
    if GATE:
        up = _finish(up_acc, x_scale, weight_scale, bias, row, first + N, n, inside, kind, FORM, BIAS, SWAP)
        result = gate_values(result, up, kind, GATE)
    at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, result.to(kind), mask=live[:, None] & inside[None, :])


@triton.jit
def sum_pairs(
    pairs, weights, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
    ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What the experts of each token made of it, times their weights. ADD: to what is in out."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    wait_for_kernel_before(DEPENDENT)
    acc = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(TOP_K):
        value = tl.load(pairs + (token * TOP_K + number) * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * TOP_K + number)
        acc += value
    total = acc.to(out.dtype.element_ty)
    if ADD:
        total = (total.to(tl.float32) + tl.load(out + token * WIDTH + i, mask=inside, other=0.0).to(tl.float32)).to(
            out.dtype.element_ty
        )
    tl.store(out + token * WIDTH + i, total, mask=inside)
