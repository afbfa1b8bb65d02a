# pyright: basic, reportMissingImports=false
"""Attention over the paged cache: one kernel for rows with one query, one for tiles of a prompt.

Level 1. Caches are `[blocks, block_size, kv_heads, head_dim]` by shape; any order in memory will do as long as head_dim
is contiguous. Scores are kept in units of log2, so that the exponential is one instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.kernels import reference
from tgi.kernels.batch import PREFILL_TILE, ForwardBatch

_NO_SCORE = tl.constexpr(-1.0e30)  # finite, so that a row without any token gives no NaN
_MAX_SPLITS = 32


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """q `[m, d]`, k `[n, d]` -> `[m, n]` in units of log2."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        s = softcap * _tanh(s / softcap)
    return s * 1.4426950408889634


@triton.jit
def _decode_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, tables, table_rows, seq_lens, scale, softcap,
    q_token, q_head, out_token, k_block, k_token, k_head, v_block, v_token, v_head, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row, one key/value head with all its query heads, one of SPLITS parts of the row's tokens.

    Where a row has several parts the last one to finish joins them: `counters` says how many have, and ends at 0.
    """
    kv, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    slot = tl.load(table_rows + row).to(tl.int64)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    part = tl.cdiv(tl.cdiv(seq_len - first, SPLITS), BLOCK_N) * BLOCK_N
    active = tl.maximum(tl.cdiv(seq_len - first, tl.maximum(part, 1)), 1)
    if split < active:
        m_index = tl.arange(0, M)
        d = tl.arange(0, D_PAD)
        heads = kv * GROUP + m_index
        q_mask = (m_index < GROUP)[:, None] & (d < D)[None, :]
        queries = tl.load(q + row * q_token + heads[:, None] * q_head + d[None, :], mask=q_mask, other=0.0)
        start = first + split * part
        end = tl.minimum(start + part, seq_len)
        table = tables + tl.maximum(slot, 0) * table_stride
        best = tl.full((M,), _NO_SCORE, tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D_PAD), tl.float32)
        k_base, v_base = k_cache + kv * k_head, v_cache + kv * v_head
        for n0 in range(start, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            mask = (n < end)[:, None]
            if D != D_PAD:
                mask = mask & (d < D)[None, :]
            block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
            inside = n % BLOCK_SIZE
            keys = tl.load(k_base + (block * k_block + inside * k_token)[:, None] + d[None, :], mask=mask, other=0.0)
            values = tl.load(v_base + (block * v_block + inside * v_token)[:, None] + d[None, :], mask=mask, other=0.0)
            s = _scores(queries, keys, scale, softcap, SOFTCAP, PRECISION)
            visible = n < end
            if WINDOW > 0:
                visible = visible & (n >= seq_len - WINDOW)
            s = tl.where(visible[None, :], s, _NO_SCORE)
            new_best = tl.maximum(best, tl.max(s, 1))
            shrink = tl.exp2(best - new_best)
            p = tl.exp2(s - new_best[:, None])
            p = tl.where(visible[None, :], p, 0.0)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
            best = new_best
        out_at = out + row * out_token + heads[:, None] * D + d[None, :]
        if active == 1:
            tl.store(out_at, (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty), mask=q_mask)
        else:
            place = (row * KV_HEADS + kv).to(tl.int64)
            mine = (place * SPLITS + split) * M + m_index
            tl.store(partial + mine[:, None] * D_PAD + d[None, :], acc, mask=(m_index < GROUP)[:, None])
            tl.store(stats + mine * 2, best, mask=m_index < GROUP)
            tl.store(stats + mine * 2 + 1, total, mask=m_index < GROUP)
            tl.debug_barrier()  # every thread's part is written before one of them counts
            done = tl.atomic_add(counters + place, 1, sem="acq_rel", scope="gpu")
            if done == active - 1:
                tl.debug_barrier()
                best = tl.full((M,), _NO_SCORE, tl.float32)
                total = tl.zeros((M,), tl.float32)
                acc = tl.zeros((M, D_PAD), tl.float32)
                for other in range(0, active):
                    theirs = (place * SPLITS + other) * M + m_index
                    other_best = tl.load(
                        stats + theirs * 2, mask=m_index < GROUP, other=_NO_SCORE, cache_modifier=".cg"
                    )
                    other_total = tl.load(stats + theirs * 2 + 1, mask=m_index < GROUP, other=0.0, cache_modifier=".cg")
                    other_acc = tl.load(
                        partial + theirs[:, None] * D_PAD + d[None, :],
                        mask=(m_index < GROUP)[:, None], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    new_best = tl.maximum(best, other_best)
                    shrink, other_shrink = tl.exp2(best - new_best), tl.exp2(other_best - new_best)
                    total = total * shrink + other_total * other_shrink
                    acc = acc * shrink[:, None] + other_acc * other_shrink[:, None]
                    best = new_best
                tl.store(out_at, (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty), mask=q_mask)
                tl.store(counters + place, 0)


@triton.jit
def _prefill_kernel(
    q, k_cache, v_cache, out, tables, tiles, scale, softcap,
    q_token, q_head, out_token, k_block, k_token, k_head, v_block, v_token, v_head, table_stride,
    GROUP: tl.constexpr, SUB: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """M consecutive queries of one prompt, one head. A tile says (slot, token in the batch, position, count)."""
    tile, sub, head = tl.program_id(0) // SUB, tl.program_id(0) % SUB, tl.program_id(1)
    slot = tl.load(tiles + tile * 4).to(tl.int64)
    token = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    position = tl.load(tiles + tile * 4 + 2)
    count = tl.load(tiles + tile * 4 + 3)
    if sub * M < count:
        m = sub * M + tl.arange(0, M)
        d = tl.arange(0, D_PAD)
        q_mask = (m < count)[:, None] & (d < D)[None, :]
        queries = tl.load(q + (token + m)[:, None] * q_token + head * q_head + d[None, :], mask=q_mask, other=0.0)
        query_positions = position + m
        end = position + tl.minimum(count, sub * M + M)
        start = 0
        if WINDOW > 0:
            start = tl.maximum(position + sub * M - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        table = tables + slot * table_stride
        best = tl.full((M,), _NO_SCORE, tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D_PAD), tl.float32)
        kv = head // GROUP
        k_base, v_base = k_cache + kv * k_head, v_cache + kv * v_head
        for n0 in range(start, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            mask = (n < end)[:, None]
            if D != D_PAD:
                mask = mask & (d < D)[None, :]
            block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
            inside = n % BLOCK_SIZE
            keys = tl.load(k_base + (block * k_block + inside * k_token)[:, None] + d[None, :], mask=mask, other=0.0)
            values = tl.load(v_base + (block * v_block + inside * v_token)[:, None] + d[None, :], mask=mask, other=0.0)
            s = _scores(queries, keys, scale, softcap, SOFTCAP, PRECISION)
            visible = n[None, :] <= query_positions[:, None]
            if WINDOW > 0:
                visible = visible & (n[None, :] > query_positions[:, None] - WINDOW)
            s = tl.where(visible, s, _NO_SCORE)
            new_best = tl.maximum(best, tl.max(s, 1))
            shrink = tl.exp2(best - new_best)
            p = tl.where(visible, tl.exp2(s - new_best[:, None]), 0.0)
            total = total * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
            best = new_best
        result = (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
        tl.store(out + (token + m)[:, None] * out_token + head * D + d[None, :], result, mask=q_mask)


class Workspace:
    """Where the parts of split rows meet. Shared by all layers: kernels run one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # captured steps still use them

    def take(self, device: torch.device, num_parts: int, m: int, d: int, num_places: int) -> tuple[Tensor, ...]:
        """(partial results, their statistics, counters that are 0). A capture must find them large enough already."""
        return (
            self._take("partial", num_parts * m * d, torch.float32, device),
            self._take("stats", num_parts * m * 2, torch.float32, device),
            self._take("counters", num_places, torch.int32, device),
        )

    def _take(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = self._buffers.get(name)
        if found is None or found.numel() < count:
            if found is not None:
                self._outgrown.append(found)
            found = self._buffers[name] = torch.zeros(max(count, 1), dtype=dtype, device=device)
        return found


def num_splits(rows: int, kv_heads: int, num_processors: int) -> int:
    """Parts per row so that a few programs run on each processor, however few rows there are."""
    wanted = -(-4 * num_processors // (rows * kv_heads))
    return 1 if wanted <= 1 else min(_MAX_SPLITS, triton.next_power_of_2(wanted))


class PagedAttention:
    """The op `attention`, with the choices that fit one device."""

    def __init__(self, num_processors: int, workspace: Workspace | None = None) -> None:
        self.num_processors = num_processors
        self.workspace = workspace or Workspace()
        self.decode_block, self.decode_warps, self.decode_stages = 64, 4, 3

    def __call__(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if batch.table_rows is None:
            return reference.attention(q, k_cache, v_cache, batch, scale, window, softcap)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if batch.num_decode:
            self._decode(q, k_cache, v_cache, batch, out, scale, window, softcap)
        if batch.prefill_tiles is not None:
            self._prefill(q, k_cache, v_cache, batch, out, scale, window, softcap)
        return out

    def _decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, out: Tensor,
        scale: float, window: int | None, softcap: float | None,
    ) -> None:  # fmt: skip
        rows, heads, d = batch.num_decode, q.shape[1], q.shape[2]
        kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
        group = heads // kv_heads
        m, d_pad = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(d))
        splits = num_splits(rows, kv_heads, self.num_processors)
        places = rows * kv_heads
        partial, stats, counters = self.workspace.take(q.device, places * splits if splits > 1 else 0, m, d_pad, places)
        wide = q.dtype is torch.float32
        _decode_kernel[(kv_heads, rows, splits)](
            q, k_cache, v_cache, out, partial, stats, counters, batch.block_tables, batch.table_rows, batch.seq_lens,
            scale, softcap or 1.0, q.stride(0), q.stride(1), out.stride(0), *k_cache.stride()[:3],
            *v_cache.stride()[:3], batch.block_tables.stride(0), KV_HEADS=kv_heads, GROUP=group, M=m, D=d, D_PAD=d_pad,
            BLOCK_SIZE=block_size, BLOCK_N=32 if wide or d_pad > 128 else self.decode_block, SPLITS=splits,
            WINDOW=window or 0, SOFTCAP=softcap is not None, PRECISION="ieee",
            num_warps=self.decode_warps, num_stages=2 if wide or d_pad > 128 else self.decode_stages,
        )  # fmt: skip

    def _prefill(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: ForwardBatch, out: Tensor,
        scale: float, window: int | None, softcap: float | None,
    ) -> None:  # fmt: skip
        tiles = batch.prefill_tiles
        assert tiles is not None
        heads, d = q.shape[1], q.shape[2]
        d_pad = max(16, triton.next_power_of_2(d))
        wide = q.dtype is torch.float32
        m, n, warps, stages = (32, 32, 4, 1) if wide else (64, 32, 4, 2) if d_pad > 128 else (PREFILL_TILE, 64, 8, 3)
        sub = PREFILL_TILE // m
        _prefill_kernel[(tiles.shape[0] * sub, heads)](
            q, k_cache, v_cache, out, batch.block_tables, tiles, scale, softcap or 1.0,
            q.stride(0), q.stride(1), out.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            batch.block_tables.stride(0), GROUP=heads // k_cache.shape[2], SUB=sub, M=m, D=d, D_PAD=d_pad,
            BLOCK_SIZE=k_cache.shape[1], BLOCK_N=n, WINDOW=window or 0, SOFTCAP=softcap is not None,
            PRECISION="ieee", num_warps=warps, num_stages=stages,
        )  # fmt: skip
