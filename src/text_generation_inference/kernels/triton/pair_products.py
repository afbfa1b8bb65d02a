# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Products of few tokens with their experts' matrices, where reading those is what takes the time.

Each pair of a token and one of its experts is computed by itself, without sorting. An expert that several tokens go to
is read once for each of them, by programs that run side by side. Many small programs read whole rows of a matrix
straight into registers, as those of `gemv` do.
"""

import triton
import triton.language as tl

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
    at = out + token * N + n
    kind = out.dtype.element_ty
    total = (tl.sum(acc, 1) + extra).to(kind)
    if ADD:
        total = (total.to(tl.float32) + tl.load(at, mask=here, other=0.0).to(tl.float32)).to(kind)
    tl.store(at, total, mask=here)
