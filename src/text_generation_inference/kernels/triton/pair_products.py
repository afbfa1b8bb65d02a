# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Products of few tokens with their experts' matrices, where reading those is what takes the time.

Each pair of a token and one of its experts is computed by itself, without sorting. An expert that several tokens go to
is read once for each of them, by programs that run side by side. Two forms: `pair_gate` and `pair_down` read whole rows
of a matrix straight into registers, as `gemv` does, in many small programs; `stream_gate` and `stream_down` are as many
programs as the processors hold at once, and each goes through many rows, so that what comes before (norm, choice of the
experts) is done a few times per processor rather than for every row.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.gemv import normalised
from text_generation_inference.kernels.triton.grouped_products import gate_values
from text_generation_inference.kernels.triton.launch import wait_for_kernel_before
from text_generation_inference.kernels.triton.quantize import BY_ROW, BY_SQUARE, STATIC


@triton.jit
def _input_part(x, scales, w_squares, i, inside, FORM: tl.constexpr):
    """Columns `i` of a row; with scales per square times those of both operands."""
    part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if FORM == BY_SQUARE:
        part *= tl.load(scales + i // 128, mask=inside, other=0.0)
        part *= tl.load(w_squares + i // 128, mask=inside, other=0.0)
    return part


@triton.jit
def _multiply(at, part, here, inside, FORM: tl.constexpr, WHOLE: tl.constexpr):
    weights = tl.load(at, mask=here & inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
    product = weights * part[None, :]
    if FORM and not WHOLE:  # what is past the end may be no number in FP8, and stays none when multiplied with 0
        product = tl.where(inside[None, :], product, 0.0)
    return product


@triton.jit
def pair_gate(
    x, ids, weight, bias, out, x_scale, weight_scale, x_row, columns,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    FORM: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN gated values of one pair. The matrix of an expert holds N gates, then N values; BN divides 128 or less."""
    pair = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    here = (n < N)[:, None]
    k = tl.arange(0, BK)
    SQUARES: tl.constexpr = (K + 127) // 128
    wait_for_kernel_before(DEPENDENT)
    first = tl.load(ids + pair).to(tl.int64) * (2 * N)
    row = (pair // TOP_K).to(tl.int64)
    at = weight + (first + n)[:, None] * K + k[None, :]
    squares = weight_scale + (first + tl.program_id(1) * BN) // 128 * SQUARES
    acc = tl.zeros((BN, BK), tl.float32)
    up_acc = tl.zeros((BN, BK), tl.float32)
    for k0 in tl.static_range(0, K, BK):
        inside = k0 + k < columns
        part = _input_part(x + row * x_row, x_scale + row * SQUARES, squares, k0 + k, inside, FORM)
        acc += _multiply(at + k0, part, here, inside, FORM, K % BK == 0)
        if FORM == BY_SQUARE:
            part = _input_part(
                x + row * x_row, x_scale + row * SQUARES, squares + N // 128 * SQUARES, k0 + k, inside, FORM
            )
        up_acc += _multiply(at + N * K + k0, part, here, inside, FORM, K % BK == 0)
    kind = out.dtype.element_ty
    gate, up = tl.sum(acc, 1), tl.sum(up_acc, 1)
    if (FORM == BY_ROW) | (FORM == STATIC):
        scale = tl.load(x_scale + row)
        gate *= scale * tl.load(weight_scale + first + n, mask=n < N, other=0.0)
        up *= scale * tl.load(weight_scale + first + N + n, mask=n < N, other=0.0)
    if BIAS:
        gate += tl.load(bias + first + n, mask=n < N, other=0.0).to(tl.float32)
        up += tl.load(bias + first + N + n, mask=n < N, other=0.0).to(tl.float32)
    result = gate_values(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, GATE)
    tl.store(out + pair.to(tl.int64) * N + n, result.to(kind), mask=n < N)


@triton.jit
def _add_expert(
    acc, extra, x, weight, bias, x_scale, weight_scale, pair, expert, share, n, here, k, inside, square,
    N: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What one expert adds to outputs n: products by column, which are summed once for all experts, and its bias."""
    first = expert.to(tl.int64) * N
    SQUARES: tl.constexpr = (K + 127) // 128
    squares = weight_scale + (first + square) // 128 * SQUARES
    at = weight + (first + n)[:, None] * K + k[None, :]
    part = _input_part(x + pair * K, x_scale + pair * SQUARES, squares, k, inside, FORM) * share
    product = _multiply(at, part, here[:, None], inside, FORM, WHOLE)
    if (FORM == BY_ROW) | (FORM == STATIC):
        scale = tl.load(x_scale + pair) * tl.load(weight_scale + first + n, mask=here, other=0.0)
        product *= scale[:, None]
    if BIAS:
        extra += share * tl.load(bias + first + n, mask=here, other=0.0).to(tl.float32)
    return acc + product, extra


@triton.jit
def pair_down(
    x, ids, weights, weight, bias, out, x_scale, weight_scale, columns,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN outputs of one token: the weighted sum of those of its experts, always in the same order.

    Where rows are short, threads meet once, after the last expert: before, each would wait for all before it reads on.
    ADD: to what is in out.
    """
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BN
    n = first + tl.arange(0, BN)
    here = n < N
    k = tl.arange(0, BK)
    wait_for_kernel_before(DEPENDENT)
    acc = tl.zeros((BN, BK), tl.float32)
    extra = tl.zeros((BN,), tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        expert = tl.load(ids + pair)
        share = 1.0
        if WEIGHTED:
            share = tl.load(weights + pair)
        for k0 in tl.static_range(0, K, BK):
            acc, extra = _add_expert(
                acc, extra, x, weight, bias, x_scale, weight_scale, pair, expert, share, n, here, k0 + k,
                k0 + k < columns, first, N, K, FORM, BIAS and k0 == 0, K % BK == 0,
            )  # fmt: skip
        if K > BK:  # there are many reads between the meetings, and too few registers for more
            extra += tl.sum(acc, 1)
            acc = tl.zeros((BN, BK), tl.float32)
    _finish_down(acc, extra, out + token * N + n, here, ADD)


@triton.jit
def _finish_down(acc, extra, at, here, ADD: tl.constexpr):
    kind = at.dtype.element_ty
    total = (tl.sum(acc, 1) + extra).to(kind)
    if ADD:
        total = (total.to(tl.float32) + tl.load(at, mask=here, other=0.0).to(tl.float32)).to(kind)
    tl.store(at, total, mask=here)


@triton.jit
def _choose(scores, token, slot, E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, NORMALIZED: tl.constexpr):
    """(expert, weight) in place `slot` of a token's, as `route` orders them: by how many come before each."""
    e = tl.arange(0, E_PAD)
    score = tl.load(scores + token * E + e, mask=e < E, other=float("-inf"))
    share = tl.exp(score - tl.max(score, 0))
    share = tl.where(e < E, tl.div_rn(share, tl.sum(share, 0) + tl.zeros_like(share)), -1.0)
    before = (share[None, :] > share[:, None]) | ((share[None, :] == share[:, None]) & (e[None, :] < e[:, None]))
    place = tl.sum(before.to(tl.int32), 1)
    expert = tl.max(tl.where((place == slot) & (e < E), e, 0), 0)  # a valid one, even where there are no numbers
    weight = tl.sum(tl.where(place == slot, share, 0.0), 0)
    if NORMALIZED:
        weight = weight / tl.sum(tl.where(place < TOP_K, share, 0.0), 0)
    return expert, weight


@triton.jit(do_not_specialize=["rows"])
def stream_gate(
    x, norm_weight, scores, ids, weights, weight, bias, out, x_scale, weight_scale, eps, factor, x_row, columns, rows,
    N: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr,
    PER_ROW: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, GATE: tl.constexpr,
    FORM: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, SELECT: tl.constexpr, NORMALIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """So many `rows` of gated values of one pair, BN at a time. The matrix of an expert holds N gates, then N values.

    NORM: rows of x are normalised first. SELECT: the experts follow from `scores`, and are written to `ids` and
    `weights`; else they are read there. PER_ROW: so many pairs in succession have the same row. BN divides
    `rows` and 128.
    """
    pair, part = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, K_PAD)
    inside = k < columns
    kind = out.dtype.element_ty
    SQUARES: tl.constexpr = (K + 127) // 128
    WHOLE: tl.constexpr = K == K_PAD
    wait_for_kernel_before(DEPENDENT)
    row = (pair // PER_ROW).to(tl.int64)
    value = tl.load(x + row * x_row + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        value = normalised(value, norm_weight + k, tl.rsqrt(tl.sum(value * value, 0) / K + eps), inside, kind)
    if SELECT:
        expert, share = _choose(scores, pair // TOP_K, pair % TOP_K, E, E_PAD, TOP_K, NORMALIZED)
        if part == 0:
            tl.store(ids + pair, expert)
            tl.store(weights + pair, share * factor)
    else:
        expert = tl.load(ids + pair)
    if FORM == BY_SQUARE:
        value *= tl.load(x_scale + row * SQUARES + k // 128, mask=inside, other=0.0)
    scale = 1.0
    if (FORM == BY_ROW) | (FORM == STATIC):
        scale = tl.load(x_scale + row)
    first = expert.to(tl.int64) * (2 * N)
    for n0 in tl.range(part * rows, tl.minimum(part * rows + rows, N), BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        here = n < N
        at = weight + (first + n)[:, None] * K + k[None, :]
        gates, ups = value, value
        if FORM == BY_SQUARE:
            squares = weight_scale + (first + n0) // 128 * SQUARES + k // 128
            gates = value * tl.load(squares, mask=inside, other=0.0)
            ups = value * tl.load(squares + N // 128 * SQUARES, mask=inside, other=0.0)
        gate = tl.sum(_multiply(at, gates, here[:, None], inside, FORM, WHOLE), 1)
        up = tl.sum(_multiply(at + N * K, ups, here[:, None], inside, FORM, WHOLE), 1)
        if (FORM == BY_ROW) | (FORM == STATIC):
            gate *= scale * tl.load(weight_scale + first + n, mask=here, other=0.0)
            up *= scale * tl.load(weight_scale + first + N + n, mask=here, other=0.0)
        if BIAS:
            gate += tl.load(bias + first + n, mask=here, other=0.0).to(tl.float32)
            up += tl.load(bias + first + N + n, mask=here, other=0.0).to(tl.float32)
        result = gate_values(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, GATE)
        tl.store(out + pair.to(tl.int64) * N + n, result.to(kind), mask=here)


@triton.jit
def stream_down(
    x, ids, weights, weight, bias, out, x_scale, weight_scale, columns,
    N: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, FORM: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Like `pair_down`, with experts in a loop whose reads run ahead. SLOTS: a power of two, TOP_K or more."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BN
    n = first + tl.arange(0, BN)
    here = n < N
    k = tl.arange(0, K_PAD)
    slot = tl.arange(0, SLOTS)
    wait_for_kernel_before(DEPENDENT)
    experts = tl.load(ids + token * TOP_K + slot, mask=slot < TOP_K, other=0)
    shares = tl.full((SLOTS,), 1.0, tl.float32)
    if WEIGHTED:
        shares = tl.load(weights + token * TOP_K + slot, mask=slot < TOP_K, other=0.0)
    acc = tl.zeros((BN, K_PAD), tl.float32)
    extra = tl.zeros((BN,), tl.float32)
    for number in tl.range(0, TOP_K, num_stages=STAGES):
        expert = tl.sum(tl.where(slot == number, experts, 0), 0)
        share = tl.sum(tl.where(slot == number, shares, 0.0), 0)
        acc, extra = _add_expert(
            acc, extra, x, weight, bias, x_scale, weight_scale, token * TOP_K + number, expert, share, n, here, k,
            k < columns, first, N, K, FORM, BIAS, K == K_PAD,
        )  # fmt: skip
    _finish_down(acc, extra, out + token * N + n, here, ADD)
