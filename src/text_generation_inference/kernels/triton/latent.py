# pyright: basic, reportMissingImports=false
"""The op `latent_attention` (MLA): which kernels compute it, and in which tiles. The definition is `kernels.latent`.

Three kernels where tokens are decoded, and in any pass that is captured: `absorb` (with rotation, norm and the write
into the cache), attention over latents, `expand`. Where rows are split, few are put together in the last of them, more
by `join` before it. Prompts without cached tokens of a pass that is not captured get keys and values of their own
instead, which is a third of the arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from text_generation_inference.kernels import latent as reference
from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, PagedMeta
from text_generation_inference.kernels.triton.latent_attention import latent_decode, latent_prefill
from text_generation_inference.kernels.triton.latent_products import (
    absorb,
    expand,
    join,
    join_and_expand,
    rotate_and_keep,
)
from text_generation_inference.kernels.triton.latent_prompts import latent_prompts
from text_generation_inference.kernels.triton.launch import dependent_launch, has_room

_MAX_SPLITS = 64  # a power of two
_FEW_ROWS = 8  # each is expanded by itself
_BUSY = 0.85  # share of the processors that should have work until the last one ends


@dataclass(frozen=True, slots=True)
class LatentChoice:
    columns: int  # heads times queries
    block: int  # tokens at a time
    warps: int
    stages: int


def choose_tiles(heads: int, dtype: torch.dtype, capability: tuple[int, int], prompts: bool) -> LatentChoice:
    """The largest are for 9.0: on 10.0 operands of its tensor cores leave no room for them. Before 8.0 there are 64 KB
    of shared memory, and operands of all products in it."""
    if (0, 0) < capability < (8, 0):
        return LatentChoice(8, 16, 4, 1)
    if dtype is torch.float32:
        return LatentChoice(16, 16, 4, 1)
    if capability != (9, 0):
        return LatentChoice(32, 32, 8, 2) if prompts else LatentChoice(16, 32, 4, 2)
    return LatentChoice(32, 64, 8, 3) if prompts or heads > 16 else LatentChoice(16, 64, 4, 3)


def choose_splits(places: int, num_processors: int) -> int:
    """Parts per row, so that processors, which have room for one program each, end at about the same time."""
    best, most = 1, 0.0
    for splits in range(1, max(1, min(_MAX_SPLITS, 3 * num_processors // places)) + 1):
        waves = places * splits / num_processors
        busy = waves / -(-places * splits // num_processors)
        if busy > most:
            best, most = splits, busy
        if most >= _BUSY:
            break
    return best


@dataclass(slots=True)
class _Pass:
    """What the kernels of one call share."""

    q: Tensor  # [tokens, heads, p + r]
    latent: Tensor  # [tokens, c + r]
    up: Tensor  # [heads, p + v, c]
    norm: tuple[Tensor, float]
    cos_sin: Tensor
    batch: Batch
    cache: Tensor
    scale: float
    out: Tensor  # [tokens, heads * v]

    @property
    def sizes(self) -> dict[str, int]:
        return {"C": self.latent_dim, "C_PAD": _pad(self.latent_dim)}

    @property
    def rotary(self) -> dict[str, int]:
        half = self.cos_sin.shape[1] // 2
        return {"HALF": half, "HALF_PAD": triton.next_power_of_2(half), "BLOCK_SIZE": self.cache.shape[1]}

    @property
    def latent_dim(self) -> int:
        return self.up.shape[2]

    @property
    def plain_dim(self) -> int:
        return self.q.shape[2] - self.cos_sin.shape[1]


class TritonLatentAttention:
    """The op, for one device."""

    def __init__(
        self, num_processors: int, capability: tuple[int, int], in_flight: Callable[..., int] | None = None
    ) -> None:
        self._num_processors = num_processors
        self.in_flight = in_flight  # `hopper_latent.decode`, where the GPU and Triton are made for it
        self._roomy = has_room(capability)
        self._capability = capability
        self._largest_exact = 128 if (0, 0) < capability < (8, 0) else 512  # latents in float32
        # Set, they are used whatever the work: to measure others.
        self.decode_choice: LatentChoice | None = None
        self.prefill_choice: LatentChoice | None = None
        self.splits: int | None = None

    def __call__(
        self,
        q: Tensor,  # [tokens, heads, p + r]; changed in place
        latent: Tensor,  # [tokens, c + r]; changed in place
        up: Tensor,  # [heads, p + v, c]
        norm: tuple[Tensor, float],
        cos_sin: Tensor,
        batch: Batch,
        cache: Tensor,
        scale: float,
    ) -> Tensor:
        meta = batch.meta
        tokens, heads, _ = q.shape
        plain = q.shape[2] - cos_sin.shape[1]
        fits = q.dtype is not torch.float32 or _pad(up.shape[2]) <= self._largest_exact
        if not isinstance(meta, PagedMeta) or meta.table_rows is None or not fits or cache.dtype is not q.dtype:
            return reference.latent_attention(q, latent, up, norm, cos_sin, batch, cache, scale)
        out = torch.empty((tokens, heads * (up.shape[1] - plain)), dtype=q.dtype, device=q.device)
        work = _Pass(q, latent, up, norm, cos_sin, batch, cache, scale, out)
        if tokens == 0:
            return out
        if meta.prefill_tiles is None or not meta.chunk_starts_cpu:
            self._absorbed(work, 0, tokens, meta.num_decode, meta.prefill_tiles, keep=True)
            return out
        self._rotate_and_keep(work)
        after = meta.prefill_tiles[: meta.num_prefix_tiles]
        for first, end, tiles in _runs(meta, after):
            self._absorbed(work, first, end, max(0, meta.num_decode - first), tiles, keep=False)
        fresh = meta.prefill_tiles[meta.num_prefix_tiles :]
        if fresh.shape[0]:
            self._expanded(work, fresh)
        return out

    def _absorbed(self, work: _Pass, first: int, end: int, num_decode: int, tiles: Tensor | None, keep: bool) -> None:
        """Tokens `first` to `end`, of which `num_decode` are rows that decode, the rest those of `tiles`."""
        q, up, cache, tokens = work.q[first:end], work.up, work.cache, end - first
        heads, size = q.shape[1], work.latent_dim
        absorbed = torch.empty((tokens, heads, cache.shape[3]), dtype=q.dtype, device=q.device)
        dependent = dependent_launch(tokens) and tiles is None
        launched = {"DEPENDENT": dependent, "launch_pdl": dependent}
        bm, bc = (16, 64) if tokens <= 32 else (64, 128)
        latent, kept = work.latent, bm if keep else 0
        absorb[(heads * triton.cdiv(size, bc) + kept, triton.cdiv(tokens, bm))](
            q, up, latent, *work.norm, work.cos_sin, work.batch.positions, work.batch.kv_index, cache, absorbed, tokens,
            q.stride(0), q.stride(1), up.stride(0), latent.stride(0), absorbed.stride(0), *cache.stride()[:2],
            HEADS=heads, P=work.plain_dim, P_PAD=_pad(work.plain_dim), BM=bm, BC=min(bc, _pad(size)), KEEP=keep,
            num_warps=4, **work.sizes, **work.rotary, **launched,
        )  # fmt: skip
        mixed = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
        if num_decode:
            self._decode(work, absorbed[:num_decode], mixed[:num_decode], launched)
        if tiles is not None and tiles.shape[0]:
            self._prefill(work, absorbed, mixed, tiles, first)
        if tokens > num_decode:
            self._expand(work, mixed[num_decode:], work.out[first + num_decode : end], launched)

    def _decode(self, work: _Pass, q: Tensor, mixed: Tensor, launched: dict[str, bool]) -> None:
        """Rows with one query, the first of the batch, to what is expanded of them."""
        meta: PagedMeta = work.batch.meta
        rows, heads, size, cache = q.shape[0], q.shape[1], work.latent_dim, work.cache
        choice = self.decode_choice or choose_tiles(heads, q.dtype, self._capability, prompts=False)
        groups = triton.cdiv(heads, choice.columns)
        splits = self.splits or choose_splits(rows * groups, self._num_processors)
        partial = stats = mixed
        if splits > 1:
            partial = torch.empty((rows, splits, heads, size), dtype=torch.float32, device=q.device)
            stats = torch.empty((rows, splits, heads, 2), dtype=torch.float32, device=q.device)
        if self.in_flight is not None:
            lengths, tables = work.batch.seq_lens, (meta.block_tables, meta.table_rows)
            block = self.in_flight(q, cache, mixed, partial, stats, *tables, lengths, work.scale, splits)
            if block:
                self._expand(work, mixed, work.out[:rows], launched, (partial, stats), splits, block)
                return
        latent_decode[(groups, rows, splits)](
            q, cache, mixed, partial, stats, meta.block_tables, meta.table_rows, work.batch.seq_lens, work.scale,
            q.stride(0), q.stride(1), mixed.stride(0), *cache.stride()[:2], meta.block_tables.stride(0), HEADS=heads,
            GROUP=min(heads, choice.columns), M=choice.columns, SPLIT=splits > 1, **self._tiles(work, choice),
            **launched,
        )  # fmt: skip
        self._expand(work, mixed, work.out[:rows], launched, (partial, stats), splits, choice.block)

    def _prefill(self, work: _Pass, q: Tensor, mixed: Tensor, tiles: Tensor, first: int) -> None:
        meta: PagedMeta = work.batch.meta
        heads, cache = q.shape[1], work.cache
        choice = self.prefill_choice or choose_tiles(heads, q.dtype, self._capability, prompts=True)
        group = min(heads, choice.columns)
        queries = choice.columns // group
        sub = triton.cdiv(PREFILL_TILE, queries)
        latent_prefill[(triton.cdiv(heads, group) * tiles.shape[0] * sub,)](  # the second dimension ends at 65,535
            q, cache, mixed, meta.block_tables, tiles, first, work.scale, q.stride(0), q.stride(1), mixed.stride(0),
            *cache.stride()[:2], meta.block_tables.stride(0), HEADS=heads, GROUP=group, QUERIES=queries,
            M=choice.columns, TILE_WORDS=tiles.shape[1], SUB=sub, **self._tiles(work, choice),
        )  # fmt: skip

    def _expand(
        self, work: _Pass, mixed: Tensor, out: Tensor, launched: dict[str, bool],
        parts: tuple[Tensor, Tensor] | None = None, splits: int = 1, block: int = 1,
    ) -> None:  # fmt: skip
        """mixed `[tokens, heads, c]`, or `parts` of it -> out `[tokens, heads * v]`."""
        tokens, heads, size = mixed.shape
        up = work.up[:, work.plain_dim :]
        if parts is not None and splits > 1:
            partial, stats = parts
            shared = {
                "MAX_SPLITS": _MAX_SPLITS, "HEADS": heads, "C": size, "C_PAD": _pad(size), "JOIN": 8, "BLOCK_N": block,
                "num_warps": 4, **launched,
            }  # fmt: skip
            if tokens <= _FEW_ROWS:
                bv = min(32, _pad(up.shape[1]))
                join_and_expand[(heads * triton.cdiv(up.shape[1], bv), tokens)](
                    partial, stats, work.batch.seq_lens, up, out, splits, up.stride(0), out.stride(0), V=up.shape[1],
                    BV=bv, **shared,
                )  # fmt: skip
                return
            join[(tokens, heads)](partial, stats, work.batch.seq_lens, mixed, splits, mixed.stride(0), **shared)
        bm, bv = (16, 32) if tokens <= 32 else (32, 64) if tokens <= 128 else (64, 128)
        bv = min(bv, _pad(up.shape[1]))
        expand[(heads * triton.cdiv(up.shape[1], bv), triton.cdiv(tokens, bm))](
            mixed, up, out, tokens, mixed.stride(0), up.stride(0), out.stride(0), C=size, V=up.shape[1], BM=bm, BV=bv,
            BK=min(64, _pad(size)), num_warps=4, num_stages=3, **launched,
        )  # fmt: skip

    def _rotate_and_keep(self, work: _Pass) -> None:
        q, latent, cache = work.q, work.latent, work.cache
        tokens, heads, _ = q.shape
        hb = min(16, triton.next_power_of_2(heads))
        rotate_and_keep[(tokens, 1 + triton.cdiv(heads, hb))](
            q, latent, *work.norm, work.cos_sin, work.batch.positions, work.batch.kv_index, cache, q.stride(0),
            q.stride(1), latent.stride(0), *cache.stride()[:2], HEADS=heads, HB=hb, P=work.plain_dim, num_warps=4,
            **work.sizes, **work.rotary,
        )  # fmt: skip

    def _expanded(self, work: _Pass, tiles: Tensor) -> None:
        """Prompts of which nothing is cached: with keys and values for each head."""
        q, latent, up, out = work.q, work.latent, work.up, work.out
        heads, size, plain = q.shape[1], work.latent_dim, work.plain_dim
        keys = F.linear(latent[:, :size], up.flatten(0, 1))  # [tokens, heads * (p + v)]
        value = up.shape[1] - plain
        m, block, warps, stages = (32, 32, 4, 1) if q.dtype is torch.float32 else (64, 32, 4, 2)
        if self._roomy and q.dtype is not torch.float32:
            m, block, warps, stages = 128, 64, 8, 2
        sub = PREFILL_TILE // m
        latent_prompts[(heads, tiles.shape[0] * sub)](
            q, keys, latent, out, tiles, work.scale, q.stride(0), q.stride(1), keys.stride(0), latent.stride(0),
            out.stride(0), P=plain, P_PAD=_pad(plain), R=q.shape[2] - plain, R_PAD=_pad(q.shape[2] - plain), V=value,
            V_PAD=_pad(value), C=size, TILE_WORDS=tiles.shape[1], SUB=sub, M=m, BLOCK_N=block, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip

    def _tiles(self, work: _Pass, choice: LatentChoice) -> dict[str, int]:
        size = work.latent_dim
        rope = work.cache.shape[3] - size
        return {
            **work.sizes, "R": rope, "R_PAD": _pad(rope), "BLOCK_SIZE": work.cache.shape[1], "BLOCK_N": choice.block,
            "STAGES": choice.stages, "num_warps": choice.warps, "num_stages": choice.stages,
        }  # fmt: skip


def _pad(size: int) -> int:
    """What tensor cores multiply: a power of two, and no fewer than 16."""
    return max(16, triton.next_power_of_2(size))


def _runs(meta: PagedMeta, tiles: Tensor) -> list[tuple[int, int, Tensor | None]]:
    """(first token, end, tiles) of tokens that lie together and have cached tokens before them: those that decode, and
    chunks after a prefix, whose tiles are in the order of the chunks."""
    runs: list[list[int]] = [[0, meta.num_decode, 0, 0]] if meta.num_decode else []
    token, tile = meta.num_decode, 0
    for start, end in zip(meta.chunk_starts_cpu, meta.chunk_ends_cpu, strict=True):
        if start:
            count = -(-(end - start) // PREFILL_TILE)
            if not runs or runs[-1][1] != token:
                runs.append([token, token, tile, tile])
            runs[-1][1], runs[-1][3] = token + end - start, tile + count
            tile += count
        token += end - start
    return [(first, end, tiles[one:two] if two > one else None) for first, end, one, two in runs]
