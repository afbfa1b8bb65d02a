# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""What happens between the matrix products of a layer: norms, gates, rotation with the write into the cache.

Each kernel reads and writes every byte once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fp8 import FP8, SQUARE, Fp8Weight, ScaledRows, apply_scales
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.kernels.triton.launch import dependent_launch, wait_for_kernel_before
from text_generation_inference.kernels.triton.quantize import BY_ROW, RowStore, store_columns, store_row, warps_for

BY_HEAD, OVER_ALL = tl.constexpr(1), tl.constexpr(2)  # norms of queries and keys
SILU, GELU_TANH, GELU, RELU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
QUICK_GELU = tl.constexpr(5)
_WIDE_ROW = 32768  # columns of a program
_MANY_HEADS = 64


@triton.jit
def _scaled(value, row_scale, columns, i, mask, dtype: tl.constexpr):
    """A value of an unscaled product with its scales applied, rounded as the product would have been."""
    return (value.to(tl.float32) * row_scale * tl.load(columns + i, mask=mask, other=0.0)).to(dtype)


@triton.jit
def _read(at, column, mask, row_scale, columns, SCALED: tl.constexpr):
    """In float32, with the scales that a product (`ScaledRows`) has left."""
    value = tl.load(at, mask=mask, other=0.0)
    if SCALED:
        value = _scaled(value, row_scale, columns, column, mask, at.dtype.element_ty)
    return value.to(tl.float32)


@triton.jit
def normalised(value, factors, eps, mask, weight_type: tl.constexpr, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    """A row, zeros behind its WIDTH, in float32 with its factors applied."""
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(mask, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    if not CENTRED:
        wide = wide.to(weight_type).to(tl.float32)
    return wide * factors


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, out, total, scales, input_scale, x_scales, x_columns, eps, x_row, residual_row,
    scales_row, WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr,
    CENTRED: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A row. CENTRED: its mean is subtracted, and nothing is rounded before weight and bias have been applied."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    mask = i < WIDTH
    factors = tl.full((PAD,), 1.0, tl.float32)
    if WEIGHT:
        factors = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + i, mask=mask, other=0.0).to(tl.float32)
    wait_for_kernel_before(DEPENDENT)
    value = tl.load(x + row * x_row + i, mask=mask, other=0.0)
    if SCALED:
        value = _scaled(value, tl.load(x_scales + row), x_columns, i, mask, x.dtype.element_ty)
    if ADD:
        before = tl.load(residual + row * residual_row + i, mask=mask, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * WIDTH + i, value, mask=mask)
    scaled = normalised(value, factors, eps, mask, weight.dtype.element_ty, WIDTH, CENTRED)
    if BIAS:
        scaled += shift
    scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
    store_columns(scaled, out + row * WIDTH, scales + row * scales_row, input_scale, i, WIDTH, PAD, FORM)


def _apart(x: Product) -> tuple[Tensor, Tensor, Tensor]:
    """(data, scales of rows, scales of columns); the latter two are anything where there are none."""
    if isinstance(x, ScaledRows):
        return x.data, x.rows, x.columns
    whole = apply_scales(x)
    return whole, whole, whole


def _norm(
    given: Product,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    quantize_for: Fp8Weight | None,
    centred: bool = False,
    bias: Tensor | None = None,
) -> tuple[Rows, Tensor]:
    x, x_scales, x_columns = _apart(given)
    rows, width = x.shape
    store = RowStore(rows, width, x.dtype, x.device, quantize_for)
    total = x if residual is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        pad = max(128, triton.next_power_of_2(width))
        dependent = dependent_launch(rows)
        _norm_kernel[(rows,)](
            x, x if residual is None else residual, x if weight is None else weight, x if bias is None else bias,
            store.data, total, store.scales, store.input_scale, x_scales, x_columns, eps, x.stride(0),
            0 if residual is None else residual.stride(0), store.scales_row, WIDTH=width, PAD=pad,
            ADD=residual is not None, SCALED=isinstance(given, ScaledRows), FORM=store.form, CENTRED=centred,
            WEIGHT=weight is not None, BIAS=bias is not None, DEPENDENT=dependent, num_warps=warps_for(pad),
            launch_pdl=dependent,
        )  # fmt: skip
    return store.result, total


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None) -> Rows:
    """x `[tokens, hidden]`; the result in the form that `quantize_for` is multiplied with, where there is one."""
    return _norm(x, None, weight, eps, quantize_for)[0]


def add_rms_norm(
    x: Product, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
) -> tuple[Rows, Tensor]:
    """Add x to the residual, then normalise: (normalised, new residual)."""
    return _norm(x, residual, weight, eps, quantize_for)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, quantize_for: Fp8Weight | None = None
) -> Rows:
    """x `[tokens, hidden]`: its mean subtracted, divided by its deviation."""
    return _norm(x, None, weight, eps, quantize_for, True, bias)[0]


def add_layer_norm(
    x: Product,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    quantize_for: Fp8Weight | None = None,
) -> tuple[Rows, Tensor]:
    """Add x to the residual, then normalise: (normalised, new residual)."""
    return _norm(x, residual, weight, eps, quantize_for, True, bias)


@triton.jit
def _activated(value, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        return value / (1 + tl.exp(-value))
    elif ACTIVATION == GELU_TANH:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        return value * (1 - 1 / (tl.exp(2 * inner) + 1))
    elif ACTIVATION == GELU:
        return value * 0.5 * (1 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == QUICK_GELU:
        return value / (1 + tl.exp(-1.702 * value))
    else:
        return tl.where(value < 0, 0.0, value)  # what is no number stays none


@triton.jit
def _gated(
    x, x_scales, x_columns, x_row, row, i,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Columns `i` of a row, rounded as the activations are, in float32."""
    mask = i < WIDTH
    kind = x.dtype.element_ty
    row_scale = 1.0
    if SCALED:
        row_scale = tl.load(x_scales + row)
    value = _read(x + row * x_row + i, i, mask, row_scale, x_columns, SCALED)
    value = _activated(value, ACTIVATION).to(kind).to(tl.float32)
    if GATED:
        up = _read(x + row * x_row + WIDTH + i, WIDTH + i, mask, row_scale, x_columns, SCALED)
        value = (value * up).to(kind).to(tl.float32)
    return value


@triton.jit
def _gate_kernel(
    x, out, scales, input_scale, x_scales, x_columns, x_row, scales_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, FORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns. With REST the whole row, as two powers of two: one would be half empty."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_kernel_before(DEPENDENT)
    value = _gated(x, x_scales, x_columns, x_row, row, i, WIDTH, ACTIVATION, GATED, SCALED)
    if REST > 0:
        j = BLOCK + tl.arange(0, REST)
        rest = _gated(x, x_scales, x_columns, x_row, row, j, WIDTH, ACTIVATION, GATED, SCALED)
        store_row(value, rest, out + row * WIDTH, scales + row * scales_row, i, j, WIDTH)
    else:
        store_columns(value, out + row * WIDTH, scales + row * scales_row, input_scale, i, WIDTH, BLOCK, FORM)


def _activate(given: Product, activation: tl.constexpr, quantize_for: Fp8Weight | None, gated: bool = False) -> Rows:
    x, x_scales, x_columns = _apart(given)
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    store = RowStore(rows, width, x.dtype, x.device, quantize_for)
    if rows:
        block, rest = store.block(width, 2048), 0
        if store.form == BY_ROW.value and width <= block * 3 // 4 and block > SQUARE:
            block, rest = block // 2, max(SQUARE, triton.next_power_of_2(width - block // 2))
        dependent = dependent_launch(rows)
        _gate_kernel[(rows, 1 if rest else triton.cdiv(width, block))](
            x, store.data, store.scales, store.input_scale, x_scales, x_columns, x.stride(0), store.scales_row,
            WIDTH=width, BLOCK=block, REST=rest, ACTIVATION=activation.value, GATED=gated,
            SCALED=isinstance(given, ScaledRows), FORM=store.form, DEPENDENT=dependent,
            num_warps=gate_warps(block, rest), launch_pdl=dependent,
        )  # fmt: skip
    return store.result


def gate_warps(block: int, rest: int) -> int:
    """Measured on an H200: rows of 28,672 columns are faster with 32, narrower ones were not timed with them."""
    return 32 if block == _WIDE_ROW and not rest else min(16, max(1, block // 256))


def silu_mul(gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gate_up `[tokens, 2 * width]` -> silu(gate) * up `[tokens, width]`."""
    return _activate(gate_up, SILU, quantize_for, gated=True)


def gelu_mul(gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gate_up `[tokens, 2 * width]` -> gelu(gate) * up `[tokens, width]`."""
    return _activate(gate_up, GELU, quantize_for, gated=True)


def gelu_tanh_mul(gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gate_up `[tokens, 2 * width]` -> gelu(gate, tanh form) * up `[tokens, width]`."""
    return _activate(gate_up, GELU_TANH, quantize_for, gated=True)


def silu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    return _activate(x, SILU, quantize_for)


def gelu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    return _activate(x, GELU, quantize_for)


def gelu_tanh(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gelu in its tanh form."""
    return _activate(x, GELU_TANH, quantize_for)


def quick_gelu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gelu in its sigmoid form."""
    return _activate(x, QUICK_GELU, quantize_for)


def relu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    return _activate(x, RELU, quantize_for)


@triton.jit
def _keep(value, source, to, mask, scale, SMALL: tl.constexpr, BACK: tl.constexpr):
    """Write a float32 value into the cache and, where asked, what the cache then holds back to where it came from."""
    kept = value.to(source.dtype.element_ty)
    if SMALL:
        stored = tl.div_rn(kept.to(tl.float32), scale + tl.zeros_like(value)).to(to.dtype.element_ty)
        tl.store(to, stored, mask=mask)
        if BACK:
            tl.store(source, (stored.to(tl.float32) * scale).to(source.dtype.element_ty), mask=mask)
    else:
        tl.store(to, kept.to(to.dtype.element_ty), mask=mask)
        if BACK:
            tl.store(source, kept, mask=mask)


@triton.jit
def _head_factor(squares, eps, HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """What heads with such sums of squares are multiplied with."""
    if NORM == OVER_ALL:
        squares = tl.zeros_like(squares) + tl.sum(squares, 0) / HEADS
    return tl.rsqrt(squares / D + eps)[:, None]


@triton.jit
def _normed(value, factor, weight, column, head, mask, dtype: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """Rounded as the op `rms_norm` rounds."""
    if NORM == OVER_ALL:
        column = column + head * D
    gain = tl.load(weight + column, mask=mask, other=0.0)
    return ((value * factor).to(gain.dtype).to(tl.float32) * gain.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _read_heads(
    at, weight, head, half, d, row_scale, columns, eps, first_head,
    COUNT: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """(first half, second half, what is not rotated) of heads whose first values are `at`, normalised if asked."""
    dtype: tl.constexpr = at.dtype.element_ty
    here = (head < COUNT)[:, None]
    mask, rest_mask = here & (half < HALF)[None, :], here & ((d >= 2 * HALF) & (d < D))[None, :]
    numbers, column, rest_column = head[:, None], half[None, :], d[None, :]
    scales = columns + (first_head + numbers) * D
    first = _read(at + column, column, mask, row_scale, scales, SCALED)
    second = _read(at + HALF + column, HALF + column, mask, row_scale, scales, SCALED)
    rest = tl.zeros_like(d).to(tl.float32)[None, :] + tl.zeros_like(numbers).to(tl.float32)
    if D > 2 * HALF:
        rest = _read(at + rest_column, rest_column, rest_mask, row_scale, scales, SCALED)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if D > 2 * HALF:
            squares += tl.sum(rest * rest, 1)
        factor = _head_factor(squares, eps, COUNT, D, NORM)
        first = _normed(first, factor, weight, column, numbers, mask, dtype, D, NORM)
        second = _normed(second, factor, weight, HALF + column, numbers, mask, dtype, D, NORM)
        if D > 2 * HALF:
            rest = _normed(rest, factor, weight, rest_column, numbers, rest_mask, dtype, D, NORM)
    return first, second, rest


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a row of a small table
def _rotary_kernel(
    q, k, v, cos_sin, positions, kv_index, k_cache, v_cache, k_scale, v_scale, row_scales, columns, q_weight, k_weight,
    eps, q_token, q_head, k_token, k_head, v_token, v_head, ck_block, ck_token, ck_head, cv_block, cv_token, cv_head,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, HB: tl.constexpr, SMALL: tl.constexpr, BACK: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """HB heads of one token: queries are rotated where they are, keys on their way to the cache; values only move."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_kernel_before(DEPENDENT)
    Q_PARTS: tl.constexpr = (HEADS + HB - 1) // HB
    K_PARTS: tl.constexpr = (KV_HEADS + HB - 1) // HB
    index = tl.load(kv_index + token)
    block, inside = index // BLOCK_SIZE, index % BLOCK_SIZE
    dtype: tl.constexpr = q.dtype.element_ty
    d = tl.arange(0, D_PAD)
    row_scale = 1.0
    if SCALED:
        row_scale = tl.load(row_scales + token)
    if part < Q_PARTS + K_PARTS:
        half = tl.arange(0, HALF_PAD)
        turn = cos_sin + tl.load(positions + token) * (2 * HALF) + half
        cos = tl.load(turn, mask=half < HALF, other=0.0)[None, :]
        sin = tl.load(turn + HALF, mask=half < HALF, other=0.0)[None, :]
        if part < Q_PARTS:
            head = part * HB + tl.arange(0, HB)
            mask = (head < HEADS)[:, None] & (half < HALF)[None, :]
            q_at = q + token * q_token + head[:, None] * q_head
            first, second, rest = _read_heads(
                q_at, q_weight, head, half, d, row_scale, columns, eps, 0, HEADS, D, HALF, SCALED, NORM
            )
            tl.store(q_at + half[None, :], (first * cos - second * sin).to(dtype), mask=mask)
            tl.store(q_at + HALF + half[None, :], (second * cos + first * sin).to(dtype), mask=mask)
            if D > 2 * HALF and (SCALED or NORM):
                q_rest = (head < HEADS)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
                tl.store(q_at + d[None, :], rest.to(dtype), mask=q_rest)
        else:
            head = (part - Q_PARTS) * HB + tl.arange(0, HB)
            mask = (head < KV_HEADS)[:, None] & (half < HALF)[None, :]
            k_at = k + token * k_token + head[:, None] * k_head
            first, second, rest = _read_heads(
                k_at, k_weight, head, half, d, row_scale, columns, eps, HEADS, KV_HEADS, D, HALF, SCALED, NORM
            )
            to = k_cache + block * ck_block + inside * ck_token + head[:, None] * ck_head
            source, turned_to = k_at + half[None, :], to + half[None, :]
            _keep(first * cos - second * sin, source, turned_to, mask, k_scale, SMALL, BACK)
            _keep(second * cos + first * sin, source + HALF, turned_to + HALF, mask, k_scale, SMALL, BACK)
            if D > 2 * HALF:
                k_rest = (head < KV_HEADS)[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
                _keep(rest, k_at + d[None, :], to + d[None, :], k_rest, k_scale, SMALL, BACK)
    else:
        # Names of their own: a name has one shape in both branches.
        v_index = (part - Q_PARTS - K_PARTS) * HB + tl.arange(0, HB)
        v_mask = (v_index < KV_HEADS)[:, None] & (d < D)[None, :]
        v_source = v + token * v_token + v_index[:, None] * v_head + d[None, :]
        v_to = v_cache + block * cv_block + inside * cv_token + v_index[:, None] * cv_head + d[None, :]
        v_column = (HEADS + KV_HEADS + v_index)[:, None] * D + d[None, :]
        v_value = _read(v_source, v_column, v_mask, row_scale, columns, SCALED)
        _keep(v_value, v_source, v_to, v_mask, v_scale, SMALL, BACK and (SMALL or SCALED))


def heads_at_once(heads: int, small: bool, prompts: bool) -> int:
    """Of a program that rotates. `small`: the cache is in FP8. Measured on an H200 with 64 heads."""
    return 8 if prompts or (small and heads >= _MANY_HEADS) else 16


def rotary_and_cache(
    q: Tensor,  # [tokens, heads, head_dim]; changed in place
    k: Tensor,  # [tokens, kv_heads, head_dim]; changed in place
    v: Tensor,  # [tokens, kv_heads, head_dim]; changed in place where the cache rounds it
    cos_sin: Tensor,  # [positions, rotary_dim] float32: cosines, then sines
    batch: Batch,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    scales: tuple[Tensor, Tensor] | None = None,  # of rows and columns of q, k, v side by side: see `ScaledRows`
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate q and k by position, normalised first if asked, write k and v into the cache; return the rotated q.

    k and v are left as the cache holds them if the batch has prompts, whose attention reads them from there.
    """
    tokens, heads, d = q.shape
    kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    if tokens:
        prompts = batch.meta.prefill_tiles is not None
        hb, form = triton.next_power_of_2(max(heads, kv_heads)), OVER_ALL.value
        if norms is None or not norms.over_all:  # else one program has all heads
            hb = min(heads_at_once(heads, k_cache.dtype is FP8, prompts), hb)
            form = 0 if norms is None else BY_HEAD.value
        parts = triton.cdiv(heads, hb) + 2 * triton.cdiv(kv_heads, hb)
        dependent = dependent_launch(tokens) and not prompts
        _rotary_kernel[(tokens, parts)](
            q, k, v, cos_sin, batch.positions, batch.kv_index, k_cache, v_cache, *kv_scales,
            *(scales or (q, q)), *((q, q, 0.0) if norms is None else (norms.q_weight, norms.k_weight, norms.eps)),
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], BLOCK_SIZE=k_cache.shape[1], HEADS=heads,
            KV_HEADS=kv_heads, D=d, D_PAD=triton.next_power_of_2(d), HALF=half, HALF_PAD=triton.next_power_of_2(half),
            HB=hb, SMALL=k_cache.dtype is FP8, BACK=prompts,
            SCALED=scales is not None, NORM=form, DEPENDENT=dependent,
            num_warps=4 if hb <= 16 else 8, launch_pdl=dependent,
        )  # fmt: skip
    return q
