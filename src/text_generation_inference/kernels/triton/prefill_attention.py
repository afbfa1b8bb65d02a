# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Attention of a prompt's queries, a tile of them at a time.

Tokens before the chunk are read from the paged cache, those of the chunk itself from this step's `k` and `v`,
where they lie one after the other. Only tiles that need a mask get one. Without `k` and `v` all is read from the cache.
A kernel for prompts without tokens before them (not PREFIX) has registers for larger tiles.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.decode_attention import LEAST, LOG2E, NO_SCORE, first_seen, tanh
from text_generation_inference.kernels.triton.launch import wait_for_kernel_before


@triton.jit
def look(
    queries, keys, values, visible, acc, best, total, scale, softcap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    slope=0.0, distance=0.0, ALIBI: tl.constexpr = False,
):  # fmt: skip
    """One tile of keys and values. Scores times `factor` are in units of log2."""
    s = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    factor = scale * LOG2E
    if SOFTCAP:
        s = softcap * tanh(s * (scale / softcap))
        factor = LOG2E
    if ALIBI:
        s = s * (factor / LOG2E) + slope * distance
        factor = LOG2E
    if MASKED:
        s = tl.where(visible, s, NO_SCORE)
    new_best = tl.maximum(best, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(queries.dtype), values.to(queries.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, new_best, total


@triton.jit
def _look_at_cache(
    queries, k_base, v_base, table, start, end, bound, positions, oldest, acc, best, total, scale, softcap,
    slope, k_block, k_token, v_block, v_token, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Cached tokens from `start` to `end`; whole tiles that every query sees, unless MASKED. Those before
    `bound`, whose blocks may be another's, are not read."""
    d = tl.arange(0, D_PAD)
    for n0 in range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        there = n < end
        if BOUNDED:
            there = there & (n >= bound)
        mask = there[:, None]
        if D != D_PAD:
            mask = mask & (d < D)[None, :]
        block = tl.load(table + n // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        keys_at, values_at = block * k_block + n % BLOCK_SIZE * k_token, block * v_block + n % BLOCK_SIZE * v_token
        keys = tl.load(k_base + keys_at[:, None] + d[None, :], mask=mask, other=0.0)
        values = tl.load(v_base + values_at[:, None] + d[None, :], mask=mask, other=0.0)
        visible = (n[None, :] <= positions[:, None]) & (n < end)[None, :]
        if BOUNDED:
            visible = visible & (n[None, :] >= oldest[:, None])
        acc, best, total = look(
            queries, keys, values, visible, acc, best, total, scale, softcap, MASKED, SOFTCAP, slope,
            n[None, :] - positions[:, None], ALIBI,
        )  # fmt: skip
    return acc, best, total


@triton.jit
def _look_at_own(
    queries, k_base, v_base, start, end, positions, oldest, acc, best, total, scale, softcap, slope, token_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tokens `start` to `end` of the chunk; positions count from its first. Whole tiles, unless MASKED."""
    d = tl.arange(0, D_PAD)
    i = tl.arange(0, BLOCK_N)
    inside = i[:, None] * token_stride + d[None, :]  # the same in every tile
    for n0 in range(start, end, BLOCK_N):
        keys_at = k_base + n0 * token_stride.to(tl.int64) + inside
        values_at = v_base + n0 * token_stride.to(tl.int64) + inside
        if MASKED:
            mask = (n0 + i < end)[:, None] & (d < D)[None, :]
            keys, values = tl.load(keys_at, mask=mask, other=0.0), tl.load(values_at, mask=mask, other=0.0)
        elif D != D_PAD:
            columns = (d < D)[None, :]
            keys, values = tl.load(keys_at, mask=columns, other=0.0), tl.load(values_at, mask=columns, other=0.0)
        else:
            keys, values = tl.load(keys_at), tl.load(values_at)
        visible = (n0 + i)[None, :] <= positions[:, None]
        if BOUNDED:
            visible = visible & ((n0 + i)[None, :] >= oldest[:, None])
        acc, best, total = look(
            queries, keys, values, visible, acc, best, total, scale, softcap, MASKED, SOFTCAP, slope,
            (n0 + i)[None, :] - positions[:, None], ALIBI,
        )  # fmt: skip
    return acc, best, total


@triton.jit(do_not_specialize_on_alignment=["tiles"])  # a part of a table
def prefill(
    q, k, v, k_cache, v_cache, out, tables, tiles, scale, softcap, k_scale, v_scale,
    q_token, q_head, out_token, own_token_stride, own_k_head, own_v_head,
    k_block, k_token, k_head, v_block, v_token, v_head, table_stride, slopes, sinks,
    GROUP: tl.constexpr, TILE_WORDS: tl.constexpr, SUB: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, OWN: tl.constexpr, PREFIX: tl.constexpr, SMALL: tl.constexpr, DEPENDENT: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """M queries of one prompt, one head. A tile: slot, token in the batch, its position, count, start of the chunk."""
    if DEPENDENT:
        wait_for_kernel_before()
    # Later tiles of a prompt see more, so they start first: what ends last is short.
    head, place = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    tile, sub = tiles + place // SUB * TILE_WORDS, place % SUB
    slot, token = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
    position, count = tl.load(tile + 2), tl.load(tile + 3)
    if sub * M < count:
        m = sub * M + tl.arange(0, M)
        d = tl.arange(0, D_PAD)
        q_mask = (m < count)[:, None] & (d < D)[None, :]
        queries = tl.load(q + (token + m)[:, None] * q_token + head * q_head + d[None, :], mask=q_mask, other=0.0)
        kv = head // GROUP
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head)
        first = position + sub * M  # of our queries
        end = position + tl.minimum(count, sub * M + M)
        cached = end
        if OWN:
            cached = tl.load(tile + 4)
        start, bound, masked_from = 0, 0, tl.minimum(cached, first + 1) // BLOCK_N * BLOCK_N
        BOUNDED: tl.constexpr = WINDOW > 0 or CHUNK > 0
        oldest = position + m
        if BOUNDED:
            bound = first_seen(first, WINDOW, CHUNK)
            start = bound // BLOCK_N * BLOCK_N
            masked_from = start
            oldest = first_seen(position + m, WINDOW, CHUNK)
        best = tl.full((M,), LEAST, tl.float32)
        total = tl.zeros((M,), tl.float32)
        if SINKS:
            best = tl.maximum(best, tl.load(sinks + head) * LOG2E)
            total += 1.0
        acc = tl.zeros((M, D_PAD), tl.float32)
        table = tables + slot * table_stride
        k_base, v_base, cache_scale = k_cache + kv * k_head, v_cache + kv * v_head, scale
        if SMALL:
            cache_scale = scale * k_scale
        if PREFIX:
            if not BOUNDED:
                acc, best, total = _look_at_cache(
                    queries, k_base, v_base, table, start, masked_from, bound, position + m, oldest, acc, best,
                    total, cache_scale, softcap, slope, k_block, k_token, v_block, v_token, D, D_PAD, BLOCK_SIZE,
                    BLOCK_N, BOUNDED, SOFTCAP, ALIBI, False,
                )  # fmt: skip
            acc, best, total = _look_at_cache(
                queries, k_base, v_base, table, masked_from, cached, bound, position + m, oldest, acc, best, total,
                cache_scale, softcap, slope, k_block, k_token, v_block, v_token, D, D_PAD, BLOCK_SIZE, BLOCK_N,
                BOUNDED, SOFTCAP, ALIBI, True,
            )  # fmt: skip
            if SMALL:
                acc = acc * v_scale
        if OWN:
            own_token = token - (position - cached)
            own_k = k + own_token * own_token_stride + kv * own_k_head
            own_v = v + own_token * own_token_stride + kv * own_v_head
            own_start, own_masked_from = 0, (first - cached) // BLOCK_N * BLOCK_N
            if BOUNDED:
                own_start = tl.maximum(first_seen(first, WINDOW, CHUNK) - cached, 0) // BLOCK_N * BLOCK_N
                own_masked_from = own_start
            if not BOUNDED:
                acc, best, total = _look_at_own(
                    queries, own_k, own_v, own_start, own_masked_from, position - cached + m, oldest - cached, acc,
                    best, total, scale, softcap, slope, own_token_stride, D, D_PAD, BLOCK_N, BOUNDED, SOFTCAP, ALIBI,
                    False,
                )  # fmt: skip
            acc, best, total = _look_at_own(
                queries, own_k, own_v, own_masked_from, end - cached, position - cached + m, oldest - cached, acc,
                best, total, scale, softcap, slope, own_token_stride, D, D_PAD, BLOCK_N, BOUNDED, SOFTCAP, ALIBI,
                True,
            )  # fmt: skip
        result = (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
        tl.store(out + (token + m)[:, None] * out_token + head * D + d[None, :], result, mask=q_mask)


@triton.jit(do_not_specialize=["end"], do_not_specialize_on_alignment=["tile"])
def gather_prompt(
    k, v, k_cache, v_cache, keys, values, tables, tile, end, k_scale, v_scale, own_token_stride, own_k_head, own_v_head,
    k_block, k_token, k_head, v_block, v_token, v_head, table_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A prompt's keys and values to position `end`, row by row: cached ones, then the chunk that begins in `tile`.

    Those behind the window, whose blocks may be another's, are zeros in the tile of TILE rows in which it begins, and
    anything before that."""
    slot, token, cached = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 4)
    head, d = tl.program_id(1), tl.arange(0, D)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, kept = n < cached, n < end
    if WINDOW > 0:
        oldest = tl.maximum(cached - WINDOW + 1, 0)
        there = there & (n >= oldest)
        kept = kept & (n >= oldest // TILE * TILE)
    before, own = there[:, None], ((n >= cached) & (n < end))[:, None]
    block = tl.load(tables + slot * table_stride + n // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    k_at, v_at = block * k_block + n % BLOCK_SIZE * k_token, block * v_block + n % BLOCK_SIZE * v_token
    old_k = tl.load(k_cache + head * k_head + k_at[:, None] + d[None, :], mask=before, other=0.0)
    old_v = tl.load(v_cache + head * v_head + v_at[:, None] + d[None, :], mask=before, other=0.0)
    if SMALL:
        old_k, old_v = old_k.to(tl.float32) * k_scale, old_v.to(tl.float32) * v_scale
    at = ((token + n - cached).to(tl.int64) * own_token_stride)[:, None] + d[None, :]
    new_k = tl.load(k + head * own_k_head + at, mask=own, other=0.0)
    new_v = tl.load(v + head * own_v_head + at, mask=own, other=0.0)
    to = (n.to(tl.int64) * KV_HEADS + head)[:, None] * D + d[None, :]
    tl.store(keys + to, tl.where(before, old_k.to(keys.dtype.element_ty), new_k), mask=kept[:, None])
    tl.store(values + to, tl.where(before, old_v.to(values.dtype.element_ty), new_v), mask=kept[:, None])
