# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Attention over the paged cache of latents (MLA), absorbed: heads read the same row of a token, as key and as value.

Everything is transposed: tokens of the cache times queries, because the tensor cores of capability 9.0 want many rows
on the left, and there are few queries. A tile of the cache is loaded once, into shared memory, where both products read
it. A program has GROUP heads of each of QUERIES tokens of the same row of the batch, as columns.

Rows that decode are split where they are few (SPLIT); what comes next puts their parts together (`latent_products`).
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.decode_attention import LEAST, LOG2E, NO_SCORE, find_part
from text_generation_inference.kernels.triton.launch import wait_for_kernel_before


@triton.jit
def _look(
    q_latent, q_rope, cache, table, start, end, positions, scale, c_block, c_token,
    M: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """q_latent `[M, C_PAD]`, q_rope `[M, R_PAD]`, cached tokens start to end -> acc `[C_PAD, M]`, best, total `[M]`."""
    c, r = tl.arange(0, C_PAD), tl.arange(0, R_PAD)
    factor = scale * LOG2E
    best = tl.full((M,), LEAST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((C_PAD, M), tl.float32)
    for n0 in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = (n < end)[:, None]
        block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
        at = cache + (block * c_block + n % BLOCK_SIZE * c_token)[:, None]
        if C != C_PAD:
            latents = tl.load(at + c[None, :], mask=inside & (c < C)[None, :], other=0.0)
        else:
            latents = tl.load(at + c[None, :], mask=inside, other=0.0)
        if R != R_PAD:
            keys = tl.load(at + C + r[None, :], mask=inside & (r < R)[None, :], other=0.0)
        else:
            keys = tl.load(at + C + r[None, :], mask=inside, other=0.0)
        s = tl.dot(keys, tl.trans(q_rope), input_precision="ieee")
        s = tl.dot(latents, tl.trans(q_latent), s, input_precision="ieee")
        visible = inside
        if CAUSAL:
            visible = inside & (n[:, None] <= positions[None, :])
        s = tl.where(visible, s * factor, NO_SCORE)
        new_best = tl.maximum(best, tl.max(s, 0))
        shrink = tl.exp2(best - new_best)
        p = tl.exp2(s - new_best[None, :])
        total = total * shrink + tl.sum(p, 0)
        acc = tl.dot(tl.trans(latents), p.to(latents.dtype), acc * shrink[None, :], input_precision="ieee")
        best = new_best
    return acc, best, total


@triton.jit
def _queries(q, at, mask, C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr):
    """(Their latent parts, their rotated parts)."""
    c, r = tl.arange(0, C_PAD), tl.arange(0, R_PAD)
    latent = tl.load(q + at[:, None] + c[None, :], mask=mask[:, None] & (c < C)[None, :], other=0.0)
    rope = tl.load(q + at[:, None] + C + r[None, :], mask=mask[:, None] & (r < R)[None, :], other=0.0)
    return latent, rope


@triton.jit
def latent_decode(
    q, cache, out, partial, stats, tables, table_rows, seq_lens, scale, q_token, q_head, out_token, c_block, c_token,
    table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """GROUP heads of a row with one query, over one part of its tokens."""
    group, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)  # known since the step began
    slot = tl.load(table_rows + row).to(tl.int64)
    wait_for_kernel_before(DEPENDENT)
    splits = tl.num_programs(2) if SPLIT else 1
    start, end, active = find_part(seq_len, split, splits, BLOCK_N, 0, 0)
    if split < active:
        m, c = tl.arange(0, M), tl.arange(0, C_PAD)
        head = group * GROUP + m
        mine = (m < GROUP) & (head < HEADS)
        q_latent, q_rope = _queries(q, row.to(tl.int64) * q_token + head * q_head, mine, C, C_PAD, R, R_PAD)
        table = tables + tl.maximum(slot, 0) * table_stride
        acc, best, total = _look(
            q_latent, q_rope, cache, table, start, end, m, scale, c_block, c_token, M, C, C_PAD, R, R_PAD, BLOCK_SIZE,
            BLOCK_N, STAGES, False,
        )  # fmt: skip
        mask = mine[:, None] & (c < C)[None, :]
        if SPLIT:
            place = (row.to(tl.int64) * splits + split) * HEADS + head
            tl.store(partial + place[:, None] * C + c[None, :], tl.trans(acc), mask=mask)
            tl.store(stats + place * 2, best, mask=mine)
            tl.store(stats + place * 2 + 1, total, mask=mine)
        else:
            result = tl.trans(acc / tl.maximum(total, 1e-30)[None, :])
            at = out + row.to(tl.int64) * out_token + head[:, None] * C + c[None, :]
            tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["tiles"])  # a part of a table
def latent_prefill(
    q, cache, out, tables, tiles, first_token, scale, q_token, q_head, out_token, c_block, c_token, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, TILE_WORDS: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """GROUP heads of QUERIES tokens of a prompt. A tile: slot, token in the batch, its position, count.

    q and out begin with token `first_token` of the batch.
    """
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    group = tl.program_id(0) % GROUPS
    place = (tl.num_programs(0) - 1 - tl.program_id(0)) // GROUPS  # what sees most is done first
    tile, first = tiles + place // SUB * TILE_WORDS, place % SUB * QUERIES
    slot, token = tl.load(tile).to(tl.int64), (tl.load(tile + 1) - first_token).to(tl.int64)
    position, count = tl.load(tile + 2), tl.load(tile + 3)
    if first < count:
        m, c = tl.arange(0, M), tl.arange(0, C_PAD)
        head, query = group * GROUP + m % GROUP, first + m // GROUP
        mine = (m < GROUP * QUERIES) & (head < HEADS) & (query < count)
        q_latent, q_rope = _queries(q, (token + query) * q_token + head * q_head, mine, C, C_PAD, R, R_PAD)
        end = position + tl.minimum(first + QUERIES, count)
        acc, _, total = _look(
            q_latent, q_rope, cache, tables + slot * table_stride, 0, end, position + query, scale, c_block, c_token,
            M, C, C_PAD, R, R_PAD, BLOCK_SIZE, BLOCK_N, STAGES, True,
        )  # fmt: skip
        result = tl.trans(acc / tl.maximum(total, 1e-30)[None, :])
        at = out + ((token + query) * out_token + head * C)[:, None] + c[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=mine[:, None] & (c < C)[None, :])
