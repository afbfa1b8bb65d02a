# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""What happens around the attention over latents (MLA): queries and latents before it, values after it.

`up [heads, p + v, c]` is read as the checkpoint has it. Results lie as the next kernel reads them.
"""

import triton
import triton.language as tl

from text_generation_inference.kernels.triton.decode_attention import LEAST, find_part
from text_generation_inference.kernels.triton.launch import wait_for_kernel_before


@triton.jit
def _keep_latent(
    latent, weight, eps, cos_sin, positions, kv_index, cache, token, latent_token, c_block, c_token,
    C: tl.constexpr, C_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """One token: its latent normed, its key rotated, both into the cache and, where asked, back to where they were."""
    c = tl.arange(0, C_PAD)
    index = tl.load(kv_index + token)
    source = latent + token * latent_token
    to = cache + index // BLOCK_SIZE * c_block + index % BLOCK_SIZE * c_token
    kind: tl.constexpr = latent.dtype.element_ty
    wide = tl.load(source + c, mask=c < C, other=0.0).to(tl.float32)
    gain = tl.load(weight + c, mask=c < C, other=0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)
    normed = (wide.to(gain.dtype).to(tl.float32) * gain.to(tl.float32)).to(kind)
    tl.store(to + c, normed.to(cache.dtype.element_ty), mask=c < C)
    turn = cos_sin + tl.load(positions + token) * (2 * HALF)
    half = tl.arange(0, HALF_PAD)
    inside = half < HALF
    cos, sin = tl.load(turn + half, mask=inside, other=0.0), tl.load(turn + HALF + half, mask=inside, other=0.0)
    first = tl.load(source + C + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + C + HALF + half, mask=inside, other=0.0).to(tl.float32)
    one, two = (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)
    tl.store(to + C + half, one.to(cache.dtype.element_ty), mask=inside)
    tl.store(to + C + HALF + half, two.to(cache.dtype.element_ty), mask=inside)
    if BACK:
        tl.store(source + c, normed, mask=c < C)
        tl.store(source + C + half, one, mask=inside)
        tl.store(source + C + HALF + half, two, mask=inside)


@triton.jit
def _rotate(q, to, turn, mask, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Halves of the rows at `q [rows, 1]`, by the angles at `turn [rows, 1]`; stored at `to`, which may be `q`."""
    half = tl.arange(0, HALF_PAD)[None, :]
    mask = mask & (half < HALF)
    cos, sin = tl.load(turn + half, mask=mask, other=0.0), tl.load(turn + HALF + half, mask=mask, other=0.0)
    first = tl.load(q + half, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(q + HALF + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(to + half, (first * cos - second * sin).to(to.dtype.element_ty), mask=mask)
    tl.store(to + HALF + half, (second * cos + first * sin).to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a row of a small table
def rotate_and_keep(
    q, latent, weight, eps, cos_sin, positions, kv_index, cache, q_token, q_head, latent_token, c_block, c_token,
    HEADS: tl.constexpr, HB: tl.constexpr, P: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One token, for passes whose prompts are not absorbed: HB heads of q where they are, or the latent."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        _keep_latent(
            latent, weight, eps, cos_sin, positions, kv_index, cache, token, latent_token, c_block, c_token,
            C, C_PAD, HALF, HALF_PAD, BLOCK_SIZE, True,
        )  # fmt: skip
    else:
        head = (part - 1) * HB + tl.arange(0, HB)[:, None]
        at = q + token * q_token + head * q_head + P
        turn = cos_sin + tl.load(positions + token) * (2 * HALF) + head * 0
        _rotate(at, at, turn, head < HEADS, HALF, HALF_PAD)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions"])
def absorb(
    q, up, latent, weight, eps, cos_sin, positions, kv_index, cache, out, tokens, q_token, q_head, up_head,
    latent_token, out_token, c_block, c_token,
    HEADS: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    KEEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BM tokens: of one head BC columns of `q up`, and with the first of them the rotated part. Or one token's latent.

    KEEP: queries are not rotated yet and latents not in the cache.
    """
    work, first = tl.program_id(0), tl.program_id(1) * BM
    PARTS: tl.constexpr = (C + BC - 1) // BC
    if work < HEADS * PARTS:
        head, part = work // PARTS, work % PARTS
        p, c = tl.arange(0, P_PAD), part * BC + tl.arange(0, BC)
        at = up + head.to(tl.int64) * up_head + p[:, None] * C + c[None, :]
        matrix = tl.load(at, mask=(p < P)[:, None] & (c < C)[None, :], other=0.0)
        wait_for_kernel_before(DEPENDENT)
        token = first + tl.arange(0, BM)
        live = token < tokens
        source = q + token.to(tl.int64) * q_token + head * q_head
        to = out + token.to(tl.int64) * out_token + head * (C + 2 * HALF)
        rows = tl.load(source[:, None] + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0.0)
        made = tl.dot(rows, matrix.to(rows.dtype), input_precision="ieee")
        tl.store(to[:, None] + c[None, :], made.to(out.dtype.element_ty), mask=live[:, None] & (c < C)[None, :])
        if part == 0:
            if KEEP:
                turn = cos_sin + tl.load(positions + token, mask=live, other=0)[:, None] * (2 * HALF)
                _rotate(source[:, None] + P, to[:, None] + C, turn, live[:, None], HALF, HALF_PAD)
            else:
                r = tl.arange(0, 2 * HALF_PAD)
                mask = live[:, None] & (r < 2 * HALF)[None, :]
                rope = tl.load(source[:, None] + P + r[None, :], mask=mask, other=0.0)
                tl.store(to[:, None] + C + r[None, :], rope, mask=mask)
    else:
        wait_for_kernel_before(DEPENDENT)
        mine = first + work - HEADS * PARTS
        if mine < tokens:
            _keep_latent(
                latent, weight, eps, cos_sin, positions, kv_index, cache, mine.to(tl.int64), latent_token, c_block,
                c_token, C, C_PAD, HALF, HALF_PAD, BLOCK_SIZE, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def expand(
    mixed, up, out, tokens, mixed_token, up_head, out_token,
    C: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BM tokens, of one head BV columns of `mixed up`."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    v, k = part * BV + tl.arange(0, BV), tl.arange(0, BK)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    live = (token < tokens)[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    wait_for_kernel_before(DEPENDENT)
    rows_at = mixed + token.to(tl.int64)[:, None] * mixed_token + head * C + k[None, :]
    up_at = up + head.to(tl.int64) * up_head + v[:, None] * C + k[None, :]
    acc = tl.zeros((BM, BV), tl.float32)
    for k0 in tl.range(0, C, BK):
        inside = (k0 + k < C)[None, :]
        rows = tl.load(rows_at + k0, mask=live & inside, other=0.0)
        columns = tl.load(up_at + k0, mask=(v < V)[:, None] & inside, other=0.0)
        acc = tl.dot(rows, tl.trans(columns.to(kind)), acc, input_precision="ieee")
    to = out + token.to(tl.int64)[:, None] * out_token + head * V + v[None, :]
    tl.store(to, acc.to(kind), mask=live & (v < V)[None, :])


@triton.jit
def _joined(partial, stats, seq_lens, splits, row, head, c, HEADS: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
            MAX_SPLITS: tl.constexpr, JOIN: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """What attention found of one head of a row, in parts, put together: float32 `[C_PAD]`."""
    s = tl.arange(0, MAX_SPLITS)
    seq_len = tl.load(seq_lens + row)
    _, _, active = find_part(seq_len, 0, splits, BLOCK_N, 0, 0)
    wait_for_kernel_before(DEPENDENT)
    place = row.to(tl.int64) * splits * HEADS + head
    best = tl.load(stats + (place + s * HEADS) * 2, mask=s < active, other=LEAST)
    total = tl.load(stats + (place + s * HEADS) * 2 + 1, mask=s < active, other=0.0)
    greatest = tl.max(best, 0)
    total = tl.sum(total * tl.exp2(best - greatest), 0)
    mixed = tl.zeros((C_PAD,), tl.float32)
    for first in range(0, active, JOIN):  # loads of JOIN parts do not wait for each other
        j = first + tl.arange(0, JOIN)
        share = tl.exp2(tl.load(stats + (place + j * HEADS) * 2, mask=j < active, other=LEAST) - greatest)
        share = tl.where(j < active, share, 0.0)
        found = tl.load(
            partial + (place + j * HEADS)[:, None] * C + c[None, :], mask=(j < active)[:, None] & (c < C)[None, :],
            other=0.0,
        )  # fmt: skip
        mixed += tl.sum(found * share[:, None], 0)
    return mixed / tl.maximum(total, 1e-30)


@triton.jit(do_not_specialize=["splits"])
def join(
    partial, stats, seq_lens, mixed, splits, mixed_token,
    MAX_SPLITS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, JOIN: tl.constexpr,
    BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The parts of one head of a row, put together."""
    row, head, c = tl.program_id(0), tl.program_id(1), tl.arange(0, C_PAD)
    found = _joined(
        partial, stats, seq_lens, splits, row, head, c, HEADS, C, C_PAD, MAX_SPLITS, JOIN, BLOCK_N, DEPENDENT
    )  # fmt: skip
    at = mixed + row.to(tl.int64) * mixed_token + head * C + c
    tl.store(at, found.to(mixed.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=["splits"])
def join_and_expand(
    partial, stats, seq_lens, up, out, splits, up_head, out_token,
    MAX_SPLITS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, JOIN: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The parts of one head of a row, put together, times BV rows of the head's values: for few rows."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    head, row = tl.program_id(0) // PARTS, tl.program_id(1)
    v, c = tl.program_id(0) % PARTS * BV + tl.arange(0, BV), tl.arange(0, C_PAD)
    matrix_at = up + head.to(tl.int64) * up_head + v[:, None] * C + c[None, :]
    matrix = tl.load(matrix_at, mask=(v < V)[:, None] & (c < C)[None, :], other=0.0)
    mixed = _joined(
        partial, stats, seq_lens, splits, row, head, c, HEADS, C, C_PAD, MAX_SPLITS, JOIN, BLOCK_N, DEPENDENT
    ).to(out.dtype.element_ty)  # fmt: skip
    result = tl.sum(matrix.to(tl.float32) * mixed.to(tl.float32)[None, :], 1)
    tl.store(out + row.to(tl.int64) * out_token + head * V + v, result.to(out.dtype.element_ty), mask=v < V)
