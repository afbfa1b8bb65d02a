# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Attention of prompts that have no tokens before them, for GPUs with a copy engine of their own for tiles.

Capability 9.0 and later. Keys and values are brought as whole tiles, which costs no registers for addresses,
so tiles are larger than those of `prefill_attention`. A prompt's last tile may reach into the next prompt: what it
brings from there is not looked at, not even to multiply it with 0.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.decode_attention import LEAST, LOG2E, first_seen
from text_generation_inference.kernels.triton.prefill_attention import look


@triton.jit
def _look_at_tiles(
    queries, keys, values, column, row, start, end, positions, oldest, acc, best, total, scale, softcap,
    BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Tokens `start` to `end` of the prompt, which begins in `row`; `positions` are those of the queries."""
    for n0 in range(start, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        tile = values.load([row + n0, column])
        if LAST:
            tile = tl.where((n < end)[:, None], tile, 0.0)
        visible = n[None, :] <= positions[:, None]
        if BOUNDED:
            visible = visible & (n[None, :] >= oldest[:, None])
        acc, best, total = look(
            queries, keys.load([row + n0, column]), tile, visible, acc, best, total, scale, softcap, MASKED, SOFTCAP
        )  # fmt: skip
    return acc, best, total


@triton.jit(do_not_specialize_on_alignment=["tiles"])  # a part of a table
def prefill_in_bulk(
    q, keys, values, out, tiles, scale, softcap, q_token, q_head, out_token, sinks,
    GROUP: tl.constexpr, TILE_WORDS: tl.constexpr, SUB: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """M queries of one prompt, one head. Tiles as in `prefill`."""
    head, place = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # what sees most starts first
    tile, sub = tiles + place // SUB * TILE_WORDS, place % SUB
    token, position, count = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if sub * M < count:
        m = sub * M + tl.arange(0, M)
        d = tl.arange(0, D)
        q_mask = (m < count)[:, None]
        at = token.to(tl.int64) + m
        queries = tl.load(q + at[:, None] * q_token + head * q_head + d[None, :], mask=q_mask, other=0.0)
        column, row = head // GROUP * D, token - position
        first = position + sub * M
        end = position + tl.minimum(count, sub * M + M)
        start, masked_from, last = 0, first // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N
        BOUNDED: tl.constexpr = WINDOW > 0 or CHUNK > 0
        oldest = position + m
        if BOUNDED:
            start = first_seen(first, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
            masked_from = start
            oldest = first_seen(position + m, WINDOW, CHUNK)
        best = tl.full((M,), LEAST, tl.float32)
        total = tl.zeros((M,), tl.float32)
        if SINKS:
            best = tl.maximum(best, tl.load(sinks + head) * LOG2E)
            total += 1.0
        acc = tl.zeros((M, D), tl.float32)
        if not BOUNDED:
            acc, best, total = _look_at_tiles(
                queries, keys, values, column, row, start, masked_from, position + m, oldest, acc, best, total, scale,
                softcap, BLOCK_N, BOUNDED, SOFTCAP, False, False,
            )  # fmt: skip
        acc, best, total = _look_at_tiles(
            queries, keys, values, column, row, masked_from, last, position + m, oldest, acc, best, total, scale,
            softcap, BLOCK_N, BOUNDED, SOFTCAP, True, False,
        )  # fmt: skip
        acc, best, total = _look_at_tiles(
            queries, keys, values, column, row, tl.maximum(last, start), end, position + m, oldest, acc, best, total,
            scale, softcap, BLOCK_N, BOUNDED, SOFTCAP, True, True,
        )  # fmt: skip
        result = (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * out_token + head * D + d[None, :], result, mask=q_mask)
