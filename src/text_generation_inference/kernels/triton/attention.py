# pyright: basic, reportMissingImports=false
"""The op `attention` over the paged cache, and every choice of how its kernels are launched.

Caches are `[blocks, block_size, kv_heads, head_dim]` by shape; any order in memory will do as long as head_dim
is contiguous.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, PagedMeta
from text_generation_inference.kernels.fp8 import FP8, AttentionScales
from text_generation_inference.kernels.triton.bulk_attention import prefill_in_bulk
from text_generation_inference.kernels.triton.decode_attention import decode_by_group, decode_by_lane
from text_generation_inference.kernels.triton.launch import dependent_launch
from text_generation_inference.kernels.triton.prefill_attention import gather_prompt, prefill

_MAX_SPLITS = 32
_SOME_ROWS, _MANY_ROWS = 80, 512  # many have short contexts, as memory goes
_LONG_PROMPT = 512  # tokens on average: shorter ones leave large tiles empty
_MANY_TILES = 8  # of prompts: fewer are done before the copy engine has been told what to bring
_LONG_CHUNK = 1024  # tokens: for those after a prefix it pays to lay the whole prompt out
_GATHERED_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    block: int  # tokens at a time
    warps: int
    stages: int
    splits: int  # parts of a row
    lanes: int = 0  # 0: on tensor cores


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    queries: int  # at most PREFILL_TILE
    block: int  # tokens at a time
    warps: int
    stages: int
    bulk: bool = False  # tiles are brought by the copy engine


def choose_decode(
    rows: int, kv_heads: int, group: int, d_pad: int, dtype: torch.dtype, cache_dtype: torch.dtype, num_processors: int,
    async_copies: bool = True,
) -> DecodeChoice:  # fmt: skip
    """`async_copies`: what is loaded ahead needs no registers."""
    splits = num_splits(rows, kv_heads, num_processors)
    if dtype is torch.float32 or d_pad > 128:
        large = dtype is torch.float32 and d_pad > 128 and not async_copies  # for 64 KB of shared memory
        return DecodeChoice(16 if large else 32, 4, 2, splits)
    one_warp = async_copies and group <= 8  # else its registers do not suffice
    if group == 1 and cache_dtype is FP8:
        # Lanes: tokens that one load of 16 bytes in each thread brings.
        if splits > 1:
            return DecodeChoice(64, 2, 2, splits, lanes=min(32, 1024 // d_pad))
        if rows >= _MANY_ROWS:
            return DecodeChoice(32, 1, 3, splits, lanes=min(32, 512 // d_pad))
        return DecodeChoice(64, 4, 3, splits, lanes=min(64, 2048 // d_pad))
    if cache_dtype is FP8 and rows * kv_heads <= 2 * num_processors:
        splits = max(2, splits)  # measured: 45 us instead of 58 for 32 rows of 2,112 tokens, 8 such heads
    if splits > 1:
        return DecodeChoice(64, 2, 3, splits)
    # With many programs each may be small: one waits while the others load, and a row's last tile is less empty.
    if rows >= _SOME_ROWS and one_warp:
        return DecodeChoice(32, 1, 5 if cache_dtype is FP8 else 4, splits)
    return DecodeChoice(64, 2 if cache_dtype is FP8 else 4, 3, splits)


def choose_prefill(
    d_pad: int, dtype: torch.dtype, prefix: bool, bulk: bool = False, async_copies: bool = True
) -> PrefillChoice:
    """`prefix`: some of the tokens are read from the cache; `bulk`: the copy engine can bring the others.

    GPUs without `async_copies` have 64 KB of shared memory, and operands of all products in it."""
    if not async_copies and d_pad > 128:
        return PrefillChoice(16 if dtype is torch.float32 else 32, 16, 4, 1)
    if bulk and not prefix:
        return PrefillChoice(128, 64, 8, 3, bulk=True) if d_pad <= 128 else PrefillChoice(64, 32, 4, 2, bulk=True)
    if dtype is torch.float32:
        return PrefillChoice(32, 32, 4, 1)
    if d_pad > 128:
        return PrefillChoice(64, 32, 4, 2)
    return PrefillChoice(PREFILL_TILE if prefix and async_copies else 64, 32, 4, 3)


def num_splits(rows: int, kv_heads: int, num_processors: int) -> int:
    """Parts per row so that there is work for each processor, however few rows there are."""
    places = rows * kv_heads
    wanted = -(-(2 * num_processors - places // 4) // places)  # a few too few parts are better than twice as many
    return 1 if wanted <= 1 else min(_MAX_SPLITS, triton.next_power_of_2(wanted))


class Workspace:
    """Where the parts of split rows meet. Shared by all layers: kernels run one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # captured steps still use them

    def take(self, device: torch.device, num_parts: int, heads: int, d: int, num_places: int) -> tuple[Tensor, ...]:
        """(partial results, their statistics, counters that are 0). A capture must find them large enough already."""
        return (
            self._take("partial", num_parts * heads * d, torch.float32, device),
            self._take("stats", num_parts * heads * 2, torch.float32, device),
            self._take("counters", num_places, torch.int32, device),
        )

    def room(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Anything may be in it."""
        return self._take(name, count, dtype, device)

    def _take(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = self._buffers.get(name)
        if found is None or found.numel() < count or found.dtype is not dtype:
            if found is not None:
                self._outgrown.append(found)
            found = self._buffers[name] = torch.zeros(max(count, 1), dtype=dtype, device=device)
        return found


class PagedAttention:
    """The op `attention`, with the choices that fit one device."""

    def __init__(
        self,
        num_processors: int,
        bulk_copies: bool = False,
        async_copies: bool = True,
        specialised: Callable[..., None] | None = None,
    ) -> None:
        self.num_processors = num_processors
        self.specialised = specialised  # `hopper_attention.attend`, where the GPU and Triton are made for it
        self.bulk_copies = bulk_copies  # capability 9.0 or later, with room for its tiles: see `has_room`
        self.async_copies = async_copies  # capability 8.0 or later
        self.workspace = Workspace()
        self.prompts: Callable[..., bool] | None = None  # another's kernel for prompts; False: not for this batch
        self.many_tiles, self.long_chunk = _MANY_TILES, _LONG_CHUNK
        # Set, they are used whatever the work: to measure others.
        self.decode_choice: DecodeChoice | None = None
        self.prefill_choice: PrefillChoice | None = None

    def __call__(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor | None,  # [tokens, kv_heads, head_dim], this step's own as the cache holds them
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),  # what values of a cache in FP8 are multiplied with
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        attention_chunk: int | None = None,
        in_fp8: AttentionScales | None = None,  # none: see `Ops.fp8_attention`
    ) -> Tensor:
        meta = batch.meta
        if not isinstance(meta, PagedMeta) or meta.table_rows is None:
            return reference.attention(
                q, k, v, k_cache, v_cache, batch, scale, window, softcap, kv_scales, slopes, sinks, attention_chunk
            )
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        numbers = (scale, softcap or 1.0, *kv_scales)
        d_pad = max(16, triton.next_power_of_2(q.shape[2]))
        same = {
            "GROUP": q.shape[1] // k_cache.shape[2], "D": q.shape[2], "D_PAD": d_pad, "BLOCK_SIZE": k_cache.shape[1],
            "WINDOW": window or 0, "SOFTCAP": softcap is not None, "SMALL": k_cache.dtype is FP8,
            "slopes": q if slopes is None else slopes, "ALIBI": slopes is not None,
            "sinks": q if sinks is None else sinks, "SINKS": sinks is not None, "CHUNK": attention_chunk or 0,
        }  # fmt: skip
        # Steps with prompts have more tokens than this is for, or are queued op by op, where launching takes longer.
        dependent = dependent_launch(q.shape[0]) and meta.prefill_tiles is None
        same |= {"DEPENDENT": dependent, "launch_pdl": dependent}
        if meta.num_decode:
            self._decode(q, k_cache, v_cache, batch, out, numbers, same)
        if meta.prefill_tiles is not None:
            self._prefill(q, k, v, k_cache, v_cache, batch, out, numbers, same)
        return out

    def _decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, out: Tensor,
        numbers: tuple[float, ...], same: dict[str, Any],
    ) -> None:  # fmt: skip
        meta: PagedMeta = batch.meta
        rows, kv_heads, group, d_pad = meta.num_decode, k_cache.shape[2], same["GROUP"], same["D_PAD"]
        choice = self.decode_choice or choose_decode(
            rows, kv_heads, group, d_pad, q.dtype, k_cache.dtype, self.num_processors, self.async_copies
        )
        splits, group_pad, places = choice.splits, triton.next_power_of_2(group), rows * kv_heads
        partial, stats, counters = self.workspace.take(
            q.device, places * splits if splits > 1 else 0, group_pad, d_pad, places
        )
        kernel = decode_by_lane if choice.lanes else decode_by_group
        kernel[(kv_heads, rows, splits)](
            q, k_cache, v_cache, out, partial, stats, counters, meta.block_tables, meta.table_rows, batch.seq_lens,
            *numbers, q.stride(0), q.stride(1), out.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            meta.block_tables.stride(0), KV_HEADS=kv_heads, GROUP_PAD=group_pad, BLOCK_N=choice.block,
            LANES=min(choice.lanes, choice.block), SPLIT=splits > 1,
            JOIN=max(1, min(_MAX_SPLITS, 4096 // (group_pad * d_pad))) if splits > 1 else 1,
            SAME_STRIDES=k_cache.stride() == v_cache.stride(), STAGES=choice.stages, num_warps=choice.warps,
            num_stages=choice.stages, ASM=q.is_cuda, **same,
        )  # fmt: skip

    def _prefill(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, batch: Batch,
        out: Tensor, numbers: tuple[float, ...], same: dict[str, Any],
    ) -> None:  # fmt: skip
        meta: PagedMeta = batch.meta
        tiles = meta.prefill_tiles
        assert tiles is not None
        if k is None or v is None or k.stride(0) != v.stride(0):
            self._prefill_tiles(q, None, None, k_cache, v_cache, meta, tiles, out, numbers, same, True)
            return
        plain = not any(same[each] for each in ("WINDOW", "SOFTCAP", "ALIBI", "SINKS", "CHUNK"))
        if self.prompts is not None and plain and self.prompts(q, k, v, batch, out, numbers[0]):
            return
        after, before = tiles[: meta.num_prefix_tiles], tiles[meta.num_prefix_tiles :]
        for part, prompt in self._parts(q, meta, after, same):
            if prompt:
                keys, values = self._gather(k, v, k_cache, v_cache, meta, part, prompt, numbers, same)
                self._specialised(q, keys, values, part, out, numbers, same, one=True)
            else:
                self._prefill_tiles(q, k, v, k_cache, v_cache, meta, part, out, numbers, same, True)
        if before.shape[0]:
            self._prefill_tiles(q, k, v, k_cache, v_cache, meta, before, out, numbers, same, False)

    def _parts(self, q: Tensor, meta: PagedMeta, tiles: Tensor, same: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
        """Tiles of chunks after a prefix: of a long one with the length of its prompt, of others with 0."""
        starts_ends = zip(meta.chunk_starts_cpu, meta.chunk_ends_cpu, strict=True)
        fits = self._fits(q, same)
        first, after = 0, 0
        for start, end in (chunk for chunk in starts_ends if chunk[0]):
            last = after + -(-(end - start) // PREFILL_TILE)
            if fits and end - start >= self.long_chunk:
                if first < after:
                    yield tiles[first:after], 0
                yield tiles[after:last], end
                first = last
            after = last
        if first < tiles.shape[0]:
            yield tiles[first:], 0

    def _gather(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, meta: PagedMeta, tiles: Tensor, end: int,
        numbers: tuple[float, ...], same: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The keys and values of one prompt, `[end, kv_heads, head_dim]`; those behind the window are not there."""
        tables, kv_heads, d, size = meta.block_tables, k_cache.shape[2], same["D"], same["BLOCK_SIZE"]
        most = tables.shape[1] * size  # tokens of the longest prompt that there can be
        keys, values = (
            self.workspace.room(name, most * kv_heads * d, k.dtype, k.device)[: end * kv_heads * d]
            for name in ("keys", "values")
        )
        gather_prompt[(triton.cdiv(end, _GATHERED_ROWS), kv_heads)](
            k, v, k_cache, v_cache, keys, values, tables, tiles, end, *numbers[2:], k.stride(0), k.stride(1),
            v.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], tables.stride(0), KV_HEADS=kv_heads, D=d,
            BLOCK_SIZE=size, ROWS=_GATHERED_ROWS, SMALL=same["SMALL"], WINDOW=same["WINDOW"], TILE=PREFILL_TILE,
        )  # fmt: skip
        return keys.view(end, kv_heads, d), values.view(end, kv_heads, d)

    def _specialised(
        self, q: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, out: Tensor, numbers: tuple[float, ...],
        same: dict[str, Any], one: bool,
    ) -> None:  # fmt: skip
        assert self.specialised is not None
        self.specialised(q, keys, values, out, tiles, numbers[0], same["WINDOW"], self.num_processors, one)

    def _fits(self, q: Tensor, same: dict[str, Any]) -> bool:
        """Whether the kernel in Gluon is made for it."""
        aligned = q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0 and q.stride(1) == same["D"]
        return (
            self.specialised is not None and aligned and q.dtype.itemsize == 2 and same["D"] in (64, 128)
            and not any(same[each] for each in ("SOFTCAP", "ALIBI", "SINKS", "CHUNK")) and self.prefill_choice is None
        )  # fmt: skip

    def _prefill_tiles(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, meta: PagedMeta,
        tiles: Tensor, out: Tensor, numbers: tuple[float, ...], same: dict[str, Any], prefix: bool,
    ) -> None:  # fmt: skip
        d_pad, num_tiles, tables = same["D_PAD"], tiles.shape[0], meta.block_tables
        long = num_tiles >= max(self.many_tiles, _LONG_PROMPT // PREFILL_TILE * meta.chunk_starts_cpu.count(0))
        bulk = (
            self.bulk_copies and long and q.dtype.itemsize == 2 and same["D"] == d_pad and not same["ALIBI"]
            and k is not None and k.stride(0) % 8 == 0 and k.data_ptr() % 16 == 0 and v.data_ptr() % 16 == 0
        )  # fmt: skip
        if bulk and not prefix and self._fits(q, same):
            self._specialised(q, k, v, tiles, out, numbers, same, one=False)
            return
        choice = self.prefill_choice
        if choice is None or (choice.bulk and prefix):
            choice = choose_prefill(d_pad, q.dtype, prefix, bulk, self.async_copies)
        sub = PREFILL_TILE // choice.queries
        launched = {
            "TILE_WORDS": tiles.shape[1], "SUB": sub, "M": choice.queries, "BLOCK_N": choice.block,
            "num_warps": choice.warps, "num_stages": choice.stages,
        }  # fmt: skip
        if choice.bulk:
            keys, values = (_as_tiles(part, choice.block) for part in (k, v))
            prefill_in_bulk[(q.shape[1], num_tiles * sub)](
                q, keys, values, out, tiles, *numbers[:2], q.stride(0), q.stride(1), out.stride(0),
                **{name: same[name] for name in ("sinks", "GROUP", "D", "WINDOW", "SOFTCAP", "SINKS", "CHUNK")},
                **launched,
            )  # fmt: skip
            return
        own_k, own_v = (k, v) if k is not None else (q, q)
        prefill[(q.shape[1], num_tiles * sub)](
            q, own_k, own_v, k_cache, v_cache, out, tables, tiles, *numbers,
            q.stride(0), q.stride(1), out.stride(0), own_k.stride(0), own_k.stride(1), own_v.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], tables.stride(0), OWN=k is not None, PREFIX=prefix,
            **launched, **same,
        )  # fmt: skip


def _as_tiles(x: Tensor, rows: int) -> TensorDescriptor:
    """`[tokens, heads, head_dim]` for the copy engine, in tiles of one head."""
    tokens, heads, d = x.shape
    return TensorDescriptor(x, [tokens, heads * d], [x.stride(0), 1], [rows, d])
