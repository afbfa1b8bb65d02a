# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Attention of prompts with latents (MLA) of which nothing is cached: with keys and values made for each head.

A key is what its head made of the latent, then the rotated part that all heads share: two products, so that neither has
to be copied beside the other. Values are narrower than keys.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.decode_attention import LEAST, LOG2E, NO_SCORE


@triton.jit
def _look(
    q_plain, q_rope, keys, ropes, start, end, positions, acc, best, total, factor, keys_token, ropes_token,
    P: tl.constexpr, P_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tokens `start` to `end` of a prompt. Whole tiles that every query sees, unless MASKED."""
    i, p, r, v = tl.arange(0, BLOCK_N), tl.arange(0, P_PAD), tl.arange(0, R_PAD), tl.arange(0, V_PAD)
    for n0 in range(start, end, BLOCK_N):
        n = n0 + i
        at, rope_at = (keys + n.to(tl.int64) * keys_token)[:, None], (ropes + n.to(tl.int64) * ropes_token)[:, None]
        if MASKED or P != P_PAD or R != R_PAD or V != V_PAD:
            inside = (n < end)[:, None]
            plain = tl.load(at + p[None, :], mask=inside & (p < P)[None, :], other=0.0)
            rope = tl.load(rope_at + r[None, :], mask=inside & (r < R)[None, :], other=0.0)
            values = tl.load(at + P + v[None, :], mask=inside & (v < V)[None, :], other=0.0)
        else:
            plain, rope, values = tl.load(at + p[None, :]), tl.load(rope_at + r[None, :]), tl.load(at + P + v[None, :])
        s = tl.dot(q_plain, tl.trans(plain), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(rope), s, input_precision="ieee")
        if MASKED:
            s = tl.where(n[None, :] <= positions[:, None], s, NO_SCORE)
        new_best = tl.maximum(best, tl.max(s, 1) * factor)
        weights = tl.exp2(s * factor - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    return acc, best, total


@triton.jit(do_not_specialize_on_alignment=["tiles"])  # a part of a table
def latent_prompts(
    q, keys, latent, out, tiles, scale, q_token, q_head, keys_token, latent_token, out_token,
    P: tl.constexpr, P_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    C: tl.constexpr, TILE_WORDS: tl.constexpr, SUB: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """M queries of one head. A tile: slot, token in the batch, its position, count. keys `[tokens, heads, P + V]`."""
    head, place = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # what sees most is done first
    tile, sub = tiles + place // SUB * TILE_WORDS, place % SUB
    token, position, count = tl.load(tile + 1).to(tl.int64), tl.load(tile + 2), tl.load(tile + 3)
    if sub * M < count:
        m, p, r, v = sub * M + tl.arange(0, M), tl.arange(0, P_PAD), tl.arange(0, R_PAD), tl.arange(0, V_PAD)
        live = (m < count)[:, None]
        at = (q + (token + m) * q_token + head * q_head)[:, None]
        q_plain = tl.load(at + p[None, :], mask=live & (p < P)[None, :], other=0.0)
        q_rope = tl.load(at + P + r[None, :], mask=live & (r < R)[None, :], other=0.0)
        best = tl.full((M,), LEAST, tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, V_PAD), tl.float32)
        first = token - position  # of the prompt
        own = keys + first * keys_token + head * (P + V)
        ropes = latent + first * latent_token + C
        masked_from = (position + sub * M + 1) // BLOCK_N * BLOCK_N
        end = position + tl.minimum(count, sub * M + M)
        factor = scale * LOG2E
        acc, best, total = _look(
            q_plain, q_rope, own, ropes, 0, masked_from, position + m, acc, best, total, factor, keys_token,
            latent_token, P, P_PAD, R, R_PAD, V, V_PAD, BLOCK_N, False,
        )  # fmt: skip
        acc, best, total = _look(
            q_plain, q_rope, own, ropes, masked_from, end, position + m, acc, best, total, factor, keys_token,
            latent_token, P, P_PAD, R, R_PAD, V, V_PAD, BLOCK_N, True,
        )  # fmt: skip
        result = (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
        to = (out + (token + m) * out_token + head * V)[:, None] + v[None, :]
        tl.store(to, result, mask=live & (v < V)[None, :])
