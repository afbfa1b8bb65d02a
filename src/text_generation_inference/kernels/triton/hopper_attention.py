# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN201, SIM113
"""Attention of long prompts on GPUs of capability 9.0, in Gluon: Triton with the schedule in the kernel's own hands.

One warp brings tiles of keys and values, two warpgroups compute, each for half of the queries. A warpgroup issues the
product of queries and the next keys together with that of probabilities and values, and computes the exponentials of
the first while the second runs. Programs stay: while one tile of queries ends, the first keys of the next are brought.
Tiles of keys are looked at from the last to the first, those that need a mask before the others.

Keys and values of a prompt lie in rows one after the other. Its last tile may reach into what belongs to others: such
values are set to 0, because 0 times what is not a number is not 0.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from text_generation_inference.kernels.batch import PREFILL_TILE
from text_generation_inference.kernels.triton.decode_attention import LEAST, LOG2E, NO_SCORE

BLOCK_N = 128  # keys of a tile
STAGES = 2  # tiles that are there or on their way
assert PREFILL_TILE % BLOCK_N == 0  # a gathered prompt has numbers from the tile on that its window begins in


@gluon.jit
def _work(tiles, number, num_tiles, HEADS: gl.constexpr, TILE_WORDS: gl.constexpr, BLOCK_N: gl.constexpr,
          WINDOW: gl.constexpr):  # fmt: skip
    """One head of one tile of queries: (head, token, position, count, the last tile of keys, how many)."""
    head, place = number % HEADS, num_tiles - 1 - number // HEADS  # what sees most is done first
    tile = tiles + place * TILE_WORDS
    token, position, count = gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)
    last = (position + count - 1) // BLOCK_N
    first = 0
    if WINDOW > 0:
        first = gl.maximum(position - WINDOW + 1, 0) // BLOCK_N
    return head, token, position, count, last, last - first + 1


@gluon.jit
def _bring(
    queries, keys, values, q_room, k_room, v_room, q_full, q_free, k_full, k_free, v_full, v_free, tiles, num_tiles,
    one, GROUP: gl.constexpr, HEADS: gl.constexpr, TILE_WORDS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The warp that tells the copy engine what to bring."""
    HALF: gl.constexpr = q_room.shape[1]
    done, turn = 0, 0
    for number in range(gl.program_id(0), num_tiles * HEADS, gl.num_programs(0)):
        head, token, position, _, last, seen = _work(tiles, number, num_tiles, HEADS, TILE_WORDS, BLOCK_N, WINDOW)
        row, column = (token - position) * (1 - one), head // GROUP * D
        mbarrier.wait(q_free, turn & 1 ^ 1)
        mbarrier.expect(q_full, 2 * HALF * D * 2)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(queries, [token + half * HALF, head * D], q_full, q_room.index(half))
        turn += 1
        for i in range(seen):
            stage, phase = done % STAGES, done // STAGES & 1
            n0 = (last - i) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
            tma.async_copy_global_to_shared(keys, [row + n0, column], k_full.index(stage), k_room.index(stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
            tma.async_copy_global_to_shared(values, [row + n0, column], v_full.index(stage), v_room.index(stage))
            done += 1


@gluon.jit
def _exponentials(s, positions, n0, best, total, factor, WINDOW: gl.constexpr, MASKED: gl.constexpr):
    """(Probabilities not divided yet, the greatest score, their sum, what earlier sums are multiplied with)."""
    if MASKED:
        n = n0 + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        visible = n[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > positions[:, None] - WINDOW)
        s = gl.where(visible, s, NO_SCORE)
    new_best = gl.maximum(best, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - new_best[:, None])
    shrink = gl.exp2(best - new_best)
    return p, new_best, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _look(
    q_tile, k_room, v_room, k_full, k_free, v_full, v_free, acc, p, best, total, positions, factor,
    done, last, start, end, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tiles `start` to `end`, counted from the last; `p` belongs to the one before. `done` were there before them."""
    LAYOUT: gl.constexpr = acc.type.layout
    S_LAYOUT: gl.constexpr = best.type.layout.parent
    for i in range(start, end):
        now = done + i
        stage, before = now % STAGES, (now - 1) % STAGES
        mbarrier.wait(k_full.index(stage), now // STAGES & 1)
        zeros = gl.zeros([p.shape[0], BLOCK_N], gl.float32, S_LAYOUT)
        s_later = warpgroup_mma(q_tile, k_room.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (now - 1) // STAGES & 1)
        acc_later = warpgroup_mma(p, v_room.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s_later,))
        weights, best, total, shrink = _exponentials(
            s, positions, (last - i) * BLOCK_N, best, total, factor, WINDOW, MASKED
        )
        acc, p = warpgroup_mma_wait(0, deps=(acc_later, p))
        mbarrier.arrive(v_free.index(before), count=1)
        mbarrier.arrive(k_free.index(stage), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT))[:, None]
        p = gl.convert_layout(weights.to(p.dtype), p.type.layout)
    return acc, p, best, total


@gluon.jit
def _compute(
    q_room, k_room, v_room, q_full, q_free, k_full, k_free, v_full, v_free, cleared, out, tiles, num_tiles,
    scale, out_token, me: gl.constexpr, HEADS: gl.constexpr, TILE_WORDS: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """A warpgroup: half of the queries of each tile."""
    HALF: gl.constexpr = q_room.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    PLAIN: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    factor = scale * LOG2E
    q_tile = q_room.index(me)
    done, turn, num_cleared = 0, 0, 0
    for number in range(gl.program_id(0), num_tiles * HEADS, gl.num_programs(0)):
        head, token, position, count, last, seen = _work(tiles, number, num_tiles, HEADS, TILE_WORDS, BLOCK_N, WINDOW)
        masked = last - (position + 1) // BLOCK_N + 1  # tiles that not every query sees whole
        rest = (position + count) % BLOCK_N  # rows of the last tile that are the prompt's; 0: all
        positions = position + me * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, S_LAYOUT))
        mbarrier.wait(q_full, turn & 1)
        mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
        zeros = gl.zeros([HALF, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_tile, k_room.index(done % STAGES).permute((1, 0)), zeros, use_acc=False)
        mbarrier.arrive(k_free.index(done % STAGES), count=1)
        best = gl.full([HALF], LEAST, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        weights, best, total, _ = _exponentials(s, positions, last * BLOCK_N, best, total, factor, WINDOW, True)
        p = gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2))
        if rest > 0:
            mbarrier.wait(v_full.index(done % STAGES), done // STAGES & 1)
            part = v_room.index(done % STAGES).slice(me * (BLOCK_N // 2), BLOCK_N // 2, 0)
            n = me * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(1, PLAIN))
            kept = part.load(PLAIN)
            part.store(gl.where((n < rest)[:, None], kept, gl.zeros_like(kept)))
            fence_async_shared()
            mbarrier.arrive(cleared, count=1)
            mbarrier.wait(cleared, num_cleared & 1)
            num_cleared += 1
        acc = gl.zeros([HALF, D], gl.float32, LAYOUT)
        acc, p, best, total = _look(
            q_tile, k_room, v_room, k_full, k_free, v_full, v_free, acc, p, best, total, positions, factor,
            done, last, 1, masked, BLOCK_N, STAGES, WINDOW, True,
        )  # fmt: skip
        acc, p, best, total = _look(
            q_tile, k_room, v_room, k_full, k_free, v_full, v_free, acc, p, best, total, positions, factor,
            done, last, gl.maximum(masked, 1), seen, BLOCK_N, STAGES, WINDOW, WINDOW > 0,
        )  # fmt: skip
        mbarrier.arrive(q_free, count=1)
        done += seen
        turn += 1
        stage = (done - 1) % STAGES
        mbarrier.wait(v_full.index(stage), (done - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_room.index(stage), acc)
        mbarrier.arrive(v_free.index(stage), count=1)
        result = (acc / gl.convert_layout(total, gl.SliceLayout(1, LAYOUT))[:, None]).to(out.dtype.element_ty)
        d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
        m = me * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
        at = (token + m).to(gl.int64)
        gl.store(out + at[:, None] * out_token + head * D + d[None, :], result, mask=(m < count)[:, None])


@gluon.jit(do_not_specialize=["num_tiles", "one"], do_not_specialize_on_alignment=["tiles"])
def prefill_warp_specialised(
    queries, keys, values, out, tiles, num_tiles, scale, out_token, one,
    HEADS: gl.constexpr, GROUP: gl.constexpr, TILE_WORDS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 queries, head by head, a program for each processor. Tiles as in `prefill`, in the order of what
    they see. Keys and values are those of the batch's tokens, or, if `one` is 1, all those of one prompt."""
    HALF: gl.constexpr = queries.block_type.shape[0]
    q_room = gl.allocate_shared_memory(queries.dtype, [2, HALF, D], queries.layout)
    k_room = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK_N, D], keys.layout)
    v_room = gl.allocate_shared_memory(values.dtype, [STAGES, BLOCK_N, D], values.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(cleared, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (q_room, k_room, v_room, q_full, q_free, k_full, k_free, v_full, v_free, cleared, out,
                        tiles, num_tiles, scale, out_token, 0, HEADS, TILE_WORDS, BLOCK_N, D, STAGES, WINDOW)),
            (_compute, (q_room, k_room, v_room, q_full, q_free, k_full, k_free, v_full, v_free, cleared, out,
                        tiles, num_tiles, scale, out_token, 1, HEADS, TILE_WORDS, BLOCK_N, D, STAGES, WINDOW)),
            (_bring, (queries, keys, values, q_room, k_room, v_room, q_full, q_free, k_full, k_free, v_full, v_free,
                      tiles, num_tiles, one, GROUP, HEADS, TILE_WORDS, BLOCK_N, D, STAGES, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: Tensor, scale: float, window: int, num_processors: int,
    one: bool,
) -> None:  # fmt: skip
    """`[tokens, heads, head_dim]` each, `out` `[tokens, heads * head_dim]`; `one`: `k`, `v` are one prompt's."""
    heads, kv_heads, d = q.shape[1], k.shape[1], q.shape[2]
    prefill_warp_specialised[(min(num_processors, heads * tiles.shape[0]),)](
        _as_tiles(q, PREFILL_TILE // 2), _as_tiles(k, BLOCK_N), _as_tiles(v, BLOCK_N), out, tiles, tiles.shape[0],
        scale, out.stride(0), int(one), HEADS=heads, GROUP=heads // kv_heads, TILE_WORDS=tiles.shape[1],
        BLOCK_N=BLOCK_N, D=d, STAGES=STAGES, WINDOW=window, num_warps=4,
    )  # fmt: skip


def _as_tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """For the copy engine, in tiles of one head."""
    tokens, heads, d = x.shape
    kind = gl.bfloat16 if x.dtype is torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, d], kind)
    return TensorDescriptor(x, [tokens, heads * d], [x.stride(0), 1], [rows, d], layout)
