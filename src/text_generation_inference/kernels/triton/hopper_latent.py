# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201
"""Decode attention over latents on GPUs of capability 9.0, in Gluon: `latent_attention.latent_decode` with the copies
in the kernel's own hands.

There is room for two tiles of 64 tokens. While one is computed the other is on its way, and as soon as its products are
done the one after that is asked for: two are in flight until the next begins. Triton's own pipeline would want room for
three, and with two asks for a tile only when it has nothing left to compute.

Two warpgroups: of the scores each has half of the heads, of the sums half of the latent's columns.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from text_generation_inference.kernels.triton.decode_attention import LEAST, LOG2E, NO_SCORE

LATENT, ROTATED, HEADS = 512, 64, 16  # columns of each, and heads of a program
BLOCK_N = 64  # tokens of a tile: rows on the left of a product
_WARPS = 8


@gluon.jit
def _find_blocks(table, n0, end, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Of each token of the tile that begins at `n0`; for those behind the end, that of the last one."""
    n = gl.minimum(n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    return gl.load(table + n // BLOCK_SIZE)


@gluon.jit
def _copy(
    room, cache, blocks, n0, end, column: gl.constexpr, c_block, c_token,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Some columns of a tile into `room`; behind the end there is the last token again, which is a number."""
    n = gl.minimum(n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    c = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = blocks.to(gl.int64) * c_block + n % BLOCK_SIZE * c_token
    async_copy.async_copy_global_to_shared(room, cache + at[:, None] + c[None, :])


@gluon.jit
def _queries(q, at, mine, column: gl.constexpr, M: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Some columns of each head's query, in shared memory."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, WIDTH], q.dtype.element_ty)
    c = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    value = gl.load(q + at[:, None] + c[None, :], mask=mine[:, None], other=0.0)
    return gl.allocate_shared_memory(q.dtype.element_ty, [M, WIDTH], SHARED, value)


@gluon.jit
def latent_decode_in_flight(
    q, cache, out, partial, stats, tables, table_rows, seq_lens, scale, q_token, q_head, out_token, c_block, c_token,
    table_stride,
    HEADS: gl.constexpr, M: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """M heads of a row with one query, over one part of its tokens."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 8, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, M, 16])
    kind: gl.constexpr = cache.dtype.element_ty
    group, row, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    seq_len = gl.load(seq_lens + row)
    slot = gl.maximum(gl.load(table_rows + row), 0).to(gl.int64)
    splits = 1
    if SPLIT:
        splits = gl.num_programs(2)
    size = gl.cdiv(gl.cdiv(seq_len, splits), BLOCK_N) * BLOCK_N
    start = split * size
    end = gl.minimum(start + size, seq_len)
    if start < gl.maximum(end, 1):  # a row of padding has a first part, without tokens
        table = tables + slot * table_stride
        last = gl.maximum(end, 1)
        latents = gl.allocate_shared_memory(
            kind, [2, BLOCK_N, C], gl.NVMMASharedLayout.get_default_for([BLOCK_N, C], kind)
        )
        keys = gl.allocate_shared_memory(
            kind, [2, BLOCK_N, R], gl.NVMMASharedLayout.get_default_for([BLOCK_N, R], kind)
        )
        for ahead in gl.static_range(2):
            n0 = start + ahead * BLOCK_N
            wide = _find_blocks(table, n0, last, BLOCK_SIZE, BLOCK_N, WIDE)
            narrow = _find_blocks(table, n0, last, BLOCK_SIZE, BLOCK_N, NARROW)
            if n0 < end:
                _copy(latents.index(ahead), cache, wide, n0, last, 0, c_block, c_token, BLOCK_SIZE, BLOCK_N, C, WIDE)
                _copy(keys.index(ahead), cache, narrow, n0, last, C, c_block, c_token, BLOCK_SIZE, BLOCK_N, R, NARROW)
            async_copy.commit_group()
        wide = _find_blocks(table, start + 2 * BLOCK_N, last, BLOCK_SIZE, BLOCK_N, WIDE)
        narrow = _find_blocks(table, start + 2 * BLOCK_N, last, BLOCK_SIZE, BLOCK_N, NARROW)
        head = group * M + gl.arange(0, M, layout=gl.SliceLayout(1, WIDE))
        q_at = row.to(gl.int64) * q_token + head * q_head
        q_latent = _queries(q, q_at, head < HEADS, 0, M, C, WIDE)
        head = group * M + gl.arange(0, M, layout=gl.SliceLayout(1, NARROW))
        q_at = row.to(gl.int64) * q_token + head * q_head
        q_rotated = _queries(q, q_at, head < HEADS, C, M, R, NARROW)
        p_room = gl.allocate_shared_memory(kind, [BLOCK_N, M], gl.NVMMASharedLayout.get_default_for([BLOCK_N, M], kind))
        factor = scale * LOG2E
        best = gl.full([M], LEAST, gl.float32, gl.SliceLayout(0, S_LAYOUT))
        parts = gl.zeros([BLOCK_N, M], gl.float32, S_LAYOUT)  # of the sum, by place in a tile: added up at the end
        acc = gl.zeros([C, M], gl.float32, O_LAYOUT)
        turn = 0
        for n0 in range(start, end, BLOCK_N):
            async_copy.wait_group(1)
            fence_async_shared()
            tile = latents.index(turn)
            zeros = gl.zeros([BLOCK_N, M], gl.float32, S_LAYOUT)
            s = warpgroup_mma(keys.index(turn), q_rotated.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma(tile, q_latent.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, S_LAYOUT))
            s = gl.where((n < end)[:, None], s * factor, NO_SCORE)
            new_best = gl.maximum(best, gl.max(s, 0))
            shrink = gl.exp2(best - new_best)
            p = gl.exp2(s - new_best[None, :])
            parts = parts * shrink[None, :] + p
            best = new_best
            p_room.store(p.to(kind))
            fence_async_shared()
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, O_LAYOUT))[None, :]
            acc = warpgroup_mma(tile.permute((1, 0)), p_room, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            later = n0 + 2 * BLOCK_N
            if later < end:
                _copy(tile, cache, wide, later, last, 0, c_block, c_token, BLOCK_SIZE, BLOCK_N, C, WIDE)
                _copy(keys.index(turn), cache, narrow, later, last, C, c_block, c_token, BLOCK_SIZE, BLOCK_N, R, NARROW)
            async_copy.commit_group()
            # Where the tile after that lies is asked for now, so that its copies need not wait for it.
            wide = _find_blocks(table, later + BLOCK_N, last, BLOCK_SIZE, BLOCK_N, WIDE)
            narrow = _find_blocks(table, later + BLOCK_N, last, BLOCK_SIZE, BLOCK_N, NARROW)
            turn ^= 1
        total = gl.sum(parts, 0)
        c = gl.arange(0, C, layout=gl.SliceLayout(1, O_LAYOUT))
        head = group * M + gl.arange(0, M, layout=gl.SliceLayout(0, O_LAYOUT))
        mine = (head < HEADS)[None, :]
        if SPLIT:
            place = (row.to(gl.int64) * splits + split) * HEADS + head
            gl.store(partial + place[None, :] * C + c[:, None], acc, mask=mine)
            head = group * M + gl.arange(0, M, layout=gl.SliceLayout(0, S_LAYOUT))
            place = (row.to(gl.int64) * splits + split) * HEADS + head
            gl.store(stats + place * 2, best, mask=head < HEADS)
            gl.store(stats + place * 2 + 1, total, mask=head < HEADS)
        else:
            sums = gl.convert_layout(gl.maximum(total, 1e-30), gl.SliceLayout(0, O_LAYOUT))
            result = (acc / sums[None, :]).to(out.dtype.element_ty)
            at = row.to(gl.int64) * out_token + head * C
            gl.store(out + at[None, :] + c[:, None], result, mask=mine)


def decode(
    q: Tensor, cache: Tensor, mixed: Tensor, partial: Tensor, stats: Tensor, tables: Tensor, table_rows: Tensor,
    seq_lens: Tensor, scale: float, splits: int,
) -> int:  # fmt: skip
    """q `[rows, heads, columns]` -> mixed `[rows, heads, latent]`, or parts of it, of whole tiles of so many tokens.

    0: not made for these sizes."""
    rows, heads, width = q.shape
    if heads != HEADS or (mixed.shape[2], width) != (LATENT, LATENT + ROTATED) or q.dtype.itemsize != 2:
        return 0
    latent_decode_in_flight[(1, rows, splits)](
        q, cache, mixed, partial, stats, tables, table_rows, seq_lens, scale, q.stride(0), q.stride(1), mixed.stride(0),
        *cache.stride()[:2], tables.stride(0), HEADS=heads, M=HEADS, C=LATENT, R=ROTATED, BLOCK_SIZE=cache.shape[1],
        BLOCK_N=BLOCK_N, SPLIT=splits > 1, num_warps=_WARPS,
    )  # fmt: skip
    return BLOCK_N
