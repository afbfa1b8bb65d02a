# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Attention of rows with one query over the paged cache.

Two kernels with the same arguments and the same end: one lets the tensor cores multiply, for query heads that
share keys; one multiplies by itself, for heads with keys of their own, where tensor cores would multiply padding.

A program looks at one part of one row's tokens, for one key/value head. Where rows have several parts (SPLIT) the
last one to finish joins them: `counters` says how many have, and ends at 0. Scores are in units of log2, so that the
exponential is one instruction. With a cache in FP8 operands are float16, which those convert to in hardware.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.launch import wait_for_kernel_before

NO_SCORE = tl.constexpr(-1.0e30)  # of a token that is not seen
LEAST = tl.constexpr(-1.0e20)  # below any score, above NO_SCORE: whoever has seen nothing adds exp2(-inf) = 0
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _range(largest):
    """The power of two that brings values up to `largest` into the range of float16. It rounds nothing."""
    return tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-30))))


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first token that a query there sees, where a window or the query's own chunk of positions bounds it."""
    if CHUNK > 0:
        first = position // CHUNK * CHUNK
        if WINDOW > 0:
            first = tl.maximum(first, position - WINDOW + 1)
    else:
        first = position - WINDOW + 1
    return tl.maximum(first, 0)


@triton.jit
def find_part(seq_len, split, splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """(first token, token after the last, number of parts that have any) of this part."""
    first = 0
    if WINDOW > 0 or CHUNK > 0:
        first = first_seen(seq_len - 1, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    size = tl.cdiv(tl.cdiv(seq_len - first, splits), BLOCK_N) * BLOCK_N
    active = tl.maximum(tl.cdiv(seq_len - first, tl.maximum(size, 1)), 1)
    start = first + split * size
    return start, tl.minimum(start + size, seq_len), active


@triton.jit
def _offsets(
    table, n, visible, k_block, k_token, v_block, v_token, BLOCK_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr
):  # fmt: skip
    """Where the keys and the values of tokens n are, from the head's first."""
    block = tl.load(table + n // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
    keys_at = block * k_block + n % BLOCK_SIZE * k_token
    if SAME_STRIDES:
        values_at = keys_at
    else:
        values_at = block * v_block + n % BLOCK_SIZE * v_token
    return keys_at, values_at


@triton.jit
def _finish(
    acc, best, total, out, out_token, partial, stats, counters, row, kv, split, splits, active, v_scale, g,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    JOIN: tl.constexpr,
):  # fmt: skip
    """Store what this part has found for query heads g, `acc [g, D_PAD]`; if it is the last to do so, join them all."""
    d = tl.arange(0, D_PAD)
    if active == 1:
        result = acc * (v_scale / tl.maximum(total, 1e-30))[:, None]
        at = out + row * out_token + (kv * GROUP + g)[:, None] * D + d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < D)[None, :])
    else:
        place = (row * KV_HEADS + kv).to(tl.int64)
        mine = (place * splits + split) * GROUP_PAD + g
        tl.store(partial + mine[:, None] * D_PAD + d[None, :], acc, mask=(g < GROUP)[:, None])
        tl.store(stats + mine * 2, best, mask=g < GROUP)
        tl.store(stats + mine * 2 + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # every thread's part is written before one of them counts
        done = tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu")
        if done == active - 1:
            tl.debug_barrier()
            h = tl.arange(0, GROUP_PAD)
            all_best = tl.full((GROUP_PAD,), LEAST, tl.float32)
            all_total = tl.zeros((GROUP_PAD,), tl.float32)
            all_acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
            for first in range(0, active, JOIN):  # JOIN parts at a time, whose loads do not wait for each other
                parts = first + tl.arange(0, JOIN)
                theirs = (place * splits + parts)[:, None] * GROUP_PAD + h[None, :]
                mask = (parts < active)[:, None] & (h < GROUP)[None, :]
                part_best = tl.load(stats + theirs * 2, mask=mask, other=LEAST, cache_modifier=".cg")
                part_total = tl.load(stats + theirs * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
                part_acc = tl.load(
                    partial + theirs[:, :, None] * D_PAD + d[None, None, :],
                    mask=mask[:, :, None], other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                new_best = tl.maximum(all_best, tl.max(part_best, 0))
                shrink, part_shrink = tl.exp2(all_best - new_best), tl.exp2(part_best - new_best[None, :])
                all_total = all_total * shrink + tl.sum(part_total * part_shrink, 0)
                all_acc = all_acc * shrink[:, None] + tl.sum(part_acc * part_shrink[:, :, None], 0)
                all_best = new_best
            all_result = all_acc * (v_scale / tl.maximum(all_total, 1e-30))[:, None]
            all_at = out + row * out_token + (kv * GROUP + h)[:, None] * D + d[None, :]
            tl.store(all_at, all_result.to(out.dtype.element_ty), mask=(h < GROUP)[:, None] & (d < D)[None, :])
            tl.store(counters + place, 0)


# Of the lower (the higher) bytes of two numbers of 16 bits two in float16. Said in Triton, each byte is brought on its
# own to where the conversion wants it.
_LOWER, _HIGHER = (
    tl.constexpr("{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, " + order + "; mov.b32 {l, h}, t; "
                 "cvt.rn.f16x2.e4m3x2 $0, l; }")
    for order in ("0x4420", "0x4431")
)  # fmt: skip


@triton.jit
def _halves(pairs, HIGHER: tl.constexpr, ASM: tl.constexpr):
    """One of the two numbers in FP8 that are 16 bits, in float16."""
    if ASM:
        TEXT: tl.constexpr = _HIGHER if HIGHER else _LOWER
        return tl.inline_asm_elementwise(TEXT, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return (pairs >> (8 if HIGHER else 0)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def decode_by_group(
    q, k_cache, v_cache, out, partial, stats, counters, tables, table_rows, seq_lens, scale, softcap, k_scale, v_scale,
    q_token, q_head, out_token, k_block, k_token, k_head, v_block, v_token, v_head, table_stride, slopes, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, JOIN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SAME_STRIDES: tl.constexpr, SMALL: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """All query heads of a key/value head at once, on tensor cores, which want at least 16 of them."""
    kv, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)  # known since the step began
    slot = tl.load(table_rows + row).to(tl.int64)
    if DEPENDENT:
        wait_for_kernel_before()
    splits = tl.num_programs(2) if SPLIT else 1
    start, end, active = find_part(seq_len, split, splits, BLOCK_N, WINDOW, CHUNK)
    if split < active:
        M: tl.constexpr = GROUP_PAD if GROUP_PAD > 16 else 16
        g, d = tl.arange(0, M), tl.arange(0, D_PAD)
        queries = tl.load(
            q + row * q_token + (kv * GROUP + g)[:, None] * q_head + d[None, :],
            mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        factor = tl.full((M,), 1.0, tl.float32) * scale
        if ALIBI:
            slope = tl.load(slopes + kv * GROUP + g, mask=g < GROUP, other=0.0)
        if SMALL:
            factor = factor * k_scale
            if q.dtype.element_ty != tl.float32:
                size = _range(tl.max(tl.abs(queries.to(tl.float32)), 1))
                queries = (queries.to(tl.float32) / size[:, None]).to(tl.float16)
                factor = factor * size
        table = tables + tl.maximum(slot, 0) * table_stride
        best = tl.full((M,), LEAST, tl.float32)
        total = tl.zeros((M,), tl.float32)
        if SINKS:  # the first part has seen it
            sink = tl.load(sinks + kv * GROUP + g, mask=g < GROUP, other=0.0)
            best = tl.where(split == 0, tl.maximum(sink * LOG2E, LEAST), LEAST)
            total += tl.where(split == 0, 1.0, 0.0)
        # Values in FP8 are read two by two: tensor cores want tokens side by side, and numbers of 16 bits are turned on
        # their way out of shared memory, those of 8 bits one by one.
        PAIRS: tl.constexpr = SMALL and D == D_PAD and q.dtype.element_ty != tl.float32
        k_base, v_base = k_cache + kv * k_head, v_cache + kv * v_head
        acc = tl.zeros((M, D_PAD // 2 if PAIRS else D_PAD), tl.float32)
        if PAIRS:
            odd = acc
            half = tl.arange(0, D_PAD // 2)
            v_pairs = v_base.to(tl.pointer_type(tl.int16))
        for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            n = n0 + tl.arange(0, BLOCK_N)
            visible = n < end
            if WINDOW > 0 or CHUNK > 0:  # blocks behind a window may be another's by now
                visible = visible & (n >= first_seen(seq_len - 1, WINDOW, CHUNK))
            mask = visible[:, None]
            if D != D_PAD:
                mask = mask & (d < D)[None, :]
            keys_at, values_at = _offsets(
                table, n, visible, k_block, k_token, v_block, v_token, BLOCK_SIZE, SAME_STRIDES
            )
            keys = tl.load(k_base + keys_at[:, None] + d[None, :], mask=mask, other=0.0)
            if PAIRS:
                pairs = tl.load(v_pairs + (values_at // 2)[:, None] + half[None, :], mask=visible[:, None], other=0)
            else:
                values = tl.load(v_base + values_at[:, None] + d[None, :], mask=mask, other=0.0)
            s = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee") * factor[:, None]
            if SOFTCAP:
                s = softcap * tanh(s / softcap)
            if ALIBI:
                s += slope[:, None] * (n - seq_len + 1)[None, :]
            s = tl.where(visible[None, :], s * LOG2E, NO_SCORE)
            new_best = tl.maximum(best, tl.max(s, 1))
            shrink = tl.exp2(best - new_best)
            p = tl.exp2(s - new_best[:, None])
            total = total * shrink + tl.sum(p, 1)
            p = p.to(queries.dtype)
            if PAIRS:
                acc = tl.dot(p, _halves(pairs, False, ASM), acc * shrink[:, None])
                odd = tl.dot(p, _halves(pairs, True, ASM), odd * shrink[:, None])
            else:
                acc = tl.dot(p, values.to(queries.dtype), acc * shrink[:, None], input_precision="ieee")
            best = new_best
        if PAIRS:
            acc = tl.reshape(tl.join(acc, odd), (M, D_PAD))
        _finish(
            acc, best, total, out, out_token, partial, stats, counters, row, kv, split, splits, active, v_scale, g,
            KV_HEADS, GROUP, GROUP_PAD, D, D_PAD, JOIN,
        )  # fmt: skip


@triton.jit
def decode_by_lane(
    q, k_cache, v_cache, out, partial, stats, counters, tables, table_rows, seq_lens, scale, softcap, k_scale, v_scale,
    q_token, q_head, out_token, k_block, k_token, k_head, v_block, v_token, v_head, table_stride, slopes, sinks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr, SPLIT: tl.constexpr, JOIN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SAME_STRIDES: tl.constexpr, SMALL: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One query head with keys of its own (GROUP is 1). Tokens n, n + LANES, ... are a lane with a softmax of its own.

    Lanes meet only after the loop; where a lane's tokens are in the registers of the same threads (LANES is the number
    of tokens that one load of the program brings), nothing but the sum of a score passes between threads inside it.
    Over FP8, products and the first few additions are in float16, two in one instruction, long sums in float32.
    """
    kv, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)  # known since the step began
    slot = tl.load(table_rows + row).to(tl.int64)
    if DEPENDENT:
        wait_for_kernel_before()
    splits = tl.num_programs(2) if SPLIT else 1
    start, end, active = find_part(seq_len, split, splits, BLOCK_N, WINDOW, CHUNK)
    if split < active:
        d = tl.arange(0, D_PAD)
        factor = scale
        if ALIBI:
            slope = tl.load(slopes + kv)
        if SMALL:
            factor = scale * k_scale
        query = tl.load(q + row * q_token + kv * q_head + d, mask=d < D, other=0.0)
        HALF: tl.constexpr = SMALL and q.dtype.element_ty != tl.float32
        if HALF:
            size = _range(tl.max(tl.abs(query.to(tl.float32)), 0))
            query, factor = (query.to(tl.float32) / size).to(tl.float16), factor * size
        else:
            query = query.to(tl.float32)
        table = tables + tl.maximum(slot, 0) * table_stride
        best = tl.full((LANES,), LEAST, tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        if SINKS:  # the first lane of the first part has seen it
            has_sink = (tl.arange(0, LANES) == 0) & (split == 0)
            best = tl.where(has_sink, tl.maximum(tl.load(sinks + kv) * LOG2E, LEAST), LEAST)
            total = tl.where(has_sink, 1.0, 0.0)
        acc = tl.zeros((LANES, D_PAD), tl.float32)
        k_base, v_base = k_cache + kv * k_head, v_cache + kv * v_head
        for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            n = n0 + tl.arange(0, BLOCK_N)
            visible = n < end
            if WINDOW > 0 or CHUNK > 0:  # blocks behind a window may be another's by now
                visible = visible & (n >= first_seen(seq_len - 1, WINDOW, CHUNK))
            mask = visible[:, None]
            if D != D_PAD:
                mask = mask & (d < D)[None, :]
            keys_at, values_at = _offsets(
                table, n, visible, k_block, k_token, v_block, v_token, BLOCK_SIZE, SAME_STRIDES
            )
            keys = tl.load(k_base + keys_at[:, None] + d[None, :], mask=mask, other=0.0)
            values = tl.load(v_base + values_at[:, None] + d[None, :], mask=mask, other=0.0)
            s = keys.to(query.dtype) * query[None, :]
            if HALF:  # the sixteen of one load, in pairs
                s = tl.sum(tl.reshape(s, (BLOCK_N, D_PAD // 16, 16)), 2).to(tl.float32)
            s = tl.sum(s, 1) * factor
            if SOFTCAP:
                s = softcap * tanh(s / softcap)
            if ALIBI:
                s += slope * (n - seq_len + 1)
            s = tl.reshape(tl.where(visible, s * LOG2E, NO_SCORE), (BLOCK_N // LANES, LANES))
            new_best = tl.maximum(best, tl.max(s, 0))
            shrink = tl.exp2(best - new_best)
            p = tl.exp2(s - new_best[None, :])
            total = total * shrink + tl.sum(p, 0)
            weighted = tl.reshape(p, (BLOCK_N,)).to(query.dtype)[:, None] * values.to(query.dtype)
            weighted = tl.sum(tl.reshape(weighted, (BLOCK_N // LANES, LANES, D_PAD)), 0)
            acc = acc * shrink[:, None] + weighted.to(tl.float32)
            best = new_best
        joint = tl.max(best, 0)
        shrink = tl.exp2(best - joint)
        g = tl.arange(0, 1)
        _finish(
            tl.sum(acc * shrink[:, None], 0)[None, :], joint + tl.zeros((1,), tl.float32),
            tl.sum(total * shrink, 0) + tl.zeros((1,), tl.float32), out, out_token, partial, stats, counters, row, kv,
            split, splits, active, v_scale, g, KV_HEADS, GROUP, GROUP_PAD, D, D_PAD, JOIN,
        )  # fmt: skip
