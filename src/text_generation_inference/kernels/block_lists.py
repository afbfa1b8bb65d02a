"""Padded passes of one phase, and attention over them in plain torch: the definition.

For devices that prepare one graph for each shape: such a pass holds tensors only, as scalars would make new graphs, and
which of them there are depends on the phase alone. Nothing here reads a value on the host, so that every pass with the
same shapes does the same work. Padding writes to block 0, which no request owns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels import fp8
from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, CrossMeta, PagedMeta
from text_generation_inference.kernels.fp8 import AttentionScales

_LEAST = -1e30  # below any score: whoever has seen nothing adds exp(-1e30) = 0
_MOST_SCORES = 1 << 22  # that are held at a time where both products are rounded

Key = tuple[tuple[str, tuple[int, ...]], ...]
_NOT_TENSORS = ("meta", "cross", "picture_lists")
LONG_LIVED = frozenset({"features"})  # tensors of a pass that are the same ones every time


@dataclass(slots=True)
class WholePrompts:
    """Each row is a whole prompt, padded on the right to one length; nothing of it is cached before."""

    # Of lists of all kinds: what was computed of them for the layer that comes next.
    known: dict[str, Any] | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class PromptParts:
    """Each row is what follows tokens in the cache, padded on the right to one length.

    The leading columns of the tables are those that such tokens may be in: all but as many as the length has blocks.
    """

    tables: Tensor  # [rows, blocks] int32: blocks of each row's tokens, its own included; filler 0
    starts: Tensor  # [rows] int32: tokens in the cache before the row's own
    known: dict[str, Any] | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class BlockLists:
    """One token of each row, over the blocks of all rows as one list.

    Either these are listed, row after row (`block_list`, `row_starts`), or they are the first blocks of the cache, in
    its order (`block_numbers`): these can be read where they are, and those of nobody in the pass are fillers.
    """

    block_list: Tensor | None  # [blocks] int32: what rows have in the cache, row after row; filler 0
    block_groups: Tensor  # [blocks] int32: the row each belongs to; filler -1
    block_usage: Tensor  # [blocks] int32: filled places of each; filler 1
    row_starts: Tensor | None  # [rows] int32: where in `block_list` a row begins; padding -1
    block_numbers: Tensor | None = None  # [blocks] int32: which of its row's blocks each is; filler 0
    known: dict[str, Any] | None = field(default=None, kw_only=True)

    def numbers(self) -> Tensor:
        """`[blocks]`: which of its row's blocks each is; of fillers: anything."""
        if self.block_numbers is not None:
            return self.block_numbers
        assert self.row_starts is not None
        place = torch.arange(self.block_groups.shape[0], device=self.block_groups.device)
        return place - self.row_starts[self.block_groups.clamp(min=0).long()]


@dataclass(slots=True)
class PicturesOfRows:
    """What rows that decode read of pictures, as if these were tokens before them."""

    seq_lens: Tensor  # [rows] int32: rows of pictures that each reads; 0: none
    lists: BlockLists


@dataclass(slots=True)
class PicturesOfPrompts:
    """What tokens of prompts read of pictures: of the rows of their blocks, those from one place to another."""

    blocks: Tensor  # [rows, blocks] int32: where the pictures of each prompt are; filler 0
    usage: Tensor  # [rows, blocks] int32: filled places of each, one at least in the first
    firsts: Tensor  # [tokens] int32: the first place that is read; -1: by tokens before all pictures, which read all
    ends: Tensor  # [tokens] int32: the place behind the last; 0: nothing is read


def spread_pictures(batch: Batch, block_size: int, prepare: Callable[[Batch], Batch]) -> Batch:
    """With what layers of cross-attention read, made of numbers that are on the device.

    `prepare`: see `Device.prepare`, for rows that decode.
    """
    about = batch.picture_lists
    if isinstance(about, PicturesOfRows):
        rows, reads = rows_of_pictures(about.seq_lens, about.lists), (about.seq_lens > 0)[:, None]
        cross = CrossMeta(None, reads, reads, prepare(rows), about.seq_lens.shape[0], [])
        return replace(batch, cross=cross, picture_lists=None)
    if not isinstance(about, PicturesOfPrompts):
        return batch
    count, device = about.blocks.shape[0], about.blocks.device
    firsts, ends = (each.view(count, -1, 1) for each in (about.firsts, about.ends))
    filled = (torch.arange(block_size, device=device) < about.usage[..., None]).flatten(1)
    place = torch.arange(filled.shape[1], device=device)
    mask = (place >= firsts) & (place < ends.clamp(min=1)) & filled[:, None]  # who reads nothing takes nothing of it
    reads = ends.reshape(-1, 1) > 0
    feeds = reads & (firsts.reshape(-1, 1) >= 0)
    return replace(batch, cross=CrossMeta(None, reads, feeds, None, 0, [], about.blocks, mask), picture_lists=None)


def is_padded(batch: Batch) -> bool:
    return not isinstance(batch.meta, PagedMeta)


def row_length(batch: Batch) -> int:
    """Tokens of each row, with padding."""
    return batch.input_ids.shape[0] // batch.seq_lens.shape[0]


def take_apart(batch: Batch) -> dict[str, Tensor]:
    """All tensors of a padded pass by name: what a graph reads."""
    found = {each.name: getattr(batch, each.name) for each in fields(batch) if each.name not in _NOT_TENSORS}
    found.update({each.name: getattr(batch.meta, each.name) for each in fields(batch.meta)})
    about = batch.picture_lists
    if isinstance(about, PicturesOfRows):
        found["picture_seq_lens"] = about.seq_lens
        found |= {f"picture_{each.name}": getattr(about.lists, each.name) for each in fields(about.lists)}
    elif isinstance(about, PicturesOfPrompts):
        found |= {f"picture_{each.name}": getattr(about, each.name) for each in fields(about)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def put_together(tensors: dict[str, Tensor]) -> Batch:
    """The pass that `take_apart` has taken apart."""
    meta = WholePrompts()  # said at length: torch.compile follows no loop over a dataclass's fields
    if "tables" in tensors:
        meta = PromptParts(tensors["tables"], tensors["starts"])
    if "block_groups" in tensors:
        meta = BlockLists(
            tensors.get("block_list"),
            tensors["block_groups"],
            tensors["block_usage"],
            tensors.get("row_starts"),
            tensors.get("block_numbers"),
        )
    return Batch(
        tensors["input_ids"],
        tensors["positions"],
        tensors["kv_index"],
        tensors["seq_lens"],
        meta,
        tensors.get("logit_tokens"),
        tensors.get("features"),
        tensors.get("feature_index"),
        tensors.get("grid_positions"),
        tensors.get("visible_ends"),
        picture_lists=_put_pictures_together(tensors),
        following=tensors.get("following"),
        places=tensors.get("places"),
    )


def _put_pictures_together(tensors: dict[str, Tensor]) -> PicturesOfRows | PicturesOfPrompts | None:
    if "picture_seq_lens" in tensors:
        lists = [tensors[f"picture_{name}"] for name in ("block_list", "block_groups", "block_usage", "row_starts")]
        return PicturesOfRows(tensors["picture_seq_lens"], BlockLists(*lists))
    if "picture_ends" in tensors:
        return PicturesOfPrompts(*(tensors[f"picture_{name}"] for name in ("blocks", "usage", "firsts", "ends")))
    return None


def rows_of_pictures(seq_lens: Tensor, meta: object) -> Batch:
    """What rows that decode read of pictures, `seq_lens` rows of them each."""
    nothing = torch.zeros_like(seq_lens, dtype=torch.int64)  # no tokens are written
    return Batch(nothing, nothing, nothing, seq_lens, meta)


def key_of(batch: Batch) -> Key:
    """What a graph is found by."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in take_apart(batch).items())


def attention(
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor | None,  # [tokens, kv_heads, head_dim] as `rotary_and_cache` has left them:
    v: Tensor | None,  # for devices where that is what the cache holds
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int | None = None,
    in_fp8: AttentionScales | None = None,
) -> Tensor:
    """Causal attention over a padded pass -> `[tokens, heads * head_dim]`."""
    phase = decode_attention if isinstance(batch.meta, BlockLists) else prefill_attention
    return phase(q, k_cache, v_cache, batch, scale, window, softcap, kv_scales, slopes, sinks, attention_chunk, in_fp8)


def prefill_attention(
    q: Tensor,  # [tokens, heads, head_dim]
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int | None = None,
    in_fp8: AttentionScales | None = None,
) -> Tensor:
    """Causal attention of prompts over themselves and what is cached before them -> `[tokens, heads * head_dim]`.

    Padding lies behind what real tokens look at, so the causal mask is all they need.
    """
    rows, length, size = batch.seq_lens.shape[0], row_length(batch), k_cache.shape[1]
    block, place = batch.kv_index // size, batch.kv_index % size
    keys = _read(k_cache, block, place, kv_scales[0], q.dtype)
    values = _read(v_cache, block, place, kv_scales[1], q.dtype)
    queries, keys, values = (x.reshape(rows, length, *x.shape[1:]) for x in (q, keys, values))
    context = context_of(batch, size)
    if context is not None:
        blocks = context.blocks.long()
        unseen = ~context.seen[..., None, None]
        before = [
            _read(cache, blocks, None, scale, q.dtype).flatten(1, 2).masked_fill(unseen, 0)
            for cache, scale in ((k_cache, kv_scales[0]), (v_cache, kv_scales[1]))
        ]
        keys, values = torch.cat((before[0], keys), 1), torch.cat((before[1], values), 1)
    queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
    mask, distance = prompt_mask(batch, size, window, attention_chunk)
    bias = None if slopes is None else -distance[:, None] * slopes[:, None, None]
    out = attend(queries, keys, values, mask[:, None], scale, softcap, bias, sinks, in_fp8)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class PromptContext(NamedTuple):
    """What is in the cache before the rows of a pass."""

    blocks: Tensor  # [rows, blocks] int32
    seen: Tensor  # [rows, blocks * block_size] bool: places with tokens before the row's own


def context_of(batch: Batch, block_size: int) -> PromptContext | None:
    """None: nothing is."""
    parts = batch.meta
    if not isinstance(parts, PromptParts):
        return None
    blocks = parts.tables[:, : parts.tables.shape[1] - -(-row_length(batch) // block_size)]
    place = torch.arange(blocks.shape[1] * block_size, device=blocks.device)
    return PromptContext(blocks, place < parts.starts[:, None])


def prompt_mask(
    batch: Batch, block_size: int, window: int | None = None, attention_chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """`[rows or 1, length, keys]` of a pass of prompts: which keys a token sees, and how far before it they are.

    Keys are places of the context, then the row's own tokens.
    """
    rows, length = batch.seq_lens.shape[0], row_length(batch)
    own = torch.arange(length, device=batch.seq_lens.device)[None]
    context, there = context_of(batch, block_size), None
    position = own
    if context is not None:
        own = own + batch.meta.starts[:, None]
        place = torch.arange(context.seen.shape[1], device=own.device)
        position = torch.cat((place.expand(rows, -1), own), 1)
        there = torch.cat((context.seen, torch.ones_like(own, dtype=torch.bool)), 1)[:, None]
    distance = own[:, :, None] - position[:, None]
    mask = distance >= 0
    if batch.visible_ends is not None:
        mask = position[:, None] < batch.visible_ends.view(rows, length, 1)
    if there is not None:
        mask = mask & there
    if window is not None:
        mask = mask & (distance < window)
    if attention_chunk is not None:
        mask = mask & (position[:, None] >= (own // attention_chunk * attention_chunk)[:, :, None])
    return mask, distance


def attend(
    queries: Tensor,  # [rows, heads, queries, head_dim]
    keys: Tensor,  # [rows, kv_heads, length, head_dim]
    values: Tensor,
    mask: Tensor,  # [rows, 1, queries, length]: which keys a query sees
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,  # [rows, heads, queries, length], added to the scores
    sinks: Tensor | None = None,
    in_fp8: AttentionScales | None = None,  # without bias and sinks
) -> Tensor:
    """-> like the queries, with the size of the values."""
    is_plain = softcap is None and bias is None and sinks is None and in_fp8 is None
    # Of values with a size of their own torch makes copies for all heads of a group, at a hundred times the cost.
    if is_plain and keys.shape[-1] == values.shape[-1]:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    if in_fp8 is not None:
        return _attend_in_fp8(queries, keys, values, mask, scale, softcap, in_fp8)
    scores = grouped_product(queries, keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    weights = softmax_with_sinks(scores.masked_fill(~mask, -math.inf), sinks).to(queries.dtype)
    return grouped_product(weights, values)


def _attend_in_fp8(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    in_fp8: AttentionScales,
) -> Tensor:
    """Queries one run after the other, so that their scores take a bounded part of the memory."""
    dtype, per_query = queries.dtype, queries.shape[0] * queries.shape[1] * keys.shape[2]
    queries, keys, values = round_for_products(queries, keys, values, in_fp8)
    found: list[Tensor] = []
    run = max(1, _MOST_SCORES // max(1, per_query))
    for first in range(0, queries.shape[2], run):
        some = slice(first, first + run)
        scores = grouped_product(queries[:, :, some], keys.transpose(-1, -2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[:, :, some], -math.inf)
        # Padding sees nothing: its best score is none.
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=_LEAST))
        mixed = grouped_product(fp8.rounded(weights, in_fp8.weight), values)
        found.append((mixed / weights.sum(-1, keepdim=True)).to(dtype))
    return torch.cat(found, 2)


def round_for_products(q: Tensor, k: Tensor, v: Tensor, scales: AttentionScales) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as products in FP8 have them, in float32, in which such products are summed."""
    pairs = ((q, scales.query), (k, scales.key), (v, scales.value))
    rounded_q, rounded_k, rounded_v = (fp8.rounded(x.float(), scale) for x, scale in pairs)
    return rounded_q, rounded_k, rounded_v


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """x `[rows, heads, queries, n]` times y `[rows, kv_heads, n, m]`, which heads of a group share."""
    rows, heads, queries, size = x.shape
    groups = y.shape[1]
    return (x.reshape(rows, groups, heads // groups * queries, size) @ y).view(rows, heads, queries, y.shape[3])


def decode_attention(
    q: Tensor,  # [rows, heads, head_dim]
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int | None = None,
    in_fp8: AttentionScales | None = None,
) -> Tensor:
    """Attention of each row's one token over its blocks -> `[rows, heads * head_dim]`; padding gets 0.

    Each block is looked at by itself, with the query of the row that owns it; then the blocks of a row are joined.
    """
    lists: BlockLists = batch.meta
    rows, size, kv_heads = batch.seq_lens.shape[0], k_cache.shape[1], k_cache.shape[2]
    filler = lists.block_groups < 0
    owner = lists.block_groups.clamp(min=0).long()
    place = torch.arange(size, device=q.device)
    seen = (place < lists.block_usage[:, None]) & ~filler[:, None]  # [blocks, block_size]
    number = lists.numbers()
    own = batch.seq_lens[owner, None] - 1  # the query's position
    position = number[:, None] * size + place
    distance = position - own
    if window is not None:
        seen = seen & (distance > -window)
    if attention_chunk is not None:
        seen = seen & (position >= own // attention_chunk * attention_chunk)
    # What is not seen may be anything, even NaN, and a weight of zero does not undo that.
    unseen = ~seen[..., None, None]
    blocks = slice(filler.shape[0]) if lists.block_list is None else lists.block_list.long()
    keys = _read(k_cache, blocks, None, kv_scales[0], q.dtype).masked_fill(unseen, 0).float()
    values = _read(v_cache, blocks, None, kv_scales[1], q.dtype).masked_fill(unseen, 0).float()
    queries = q.float()
    if in_fp8 is not None:
        queries, keys, values = round_for_products(queries, keys, values, in_fp8)
    queries = (queries.reshape(rows, kv_heads, -1, q.shape[2]) * scale)[owner]  # [blocks, kv_heads, group, head_dim]
    scores = torch.einsum("bhgd,bshd->bhgs", queries, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes.view(kv_heads, -1, 1) * distance[:, None, None, :]
    scores = torch.where(seen[:, None, None, :], scores, _LEAST)
    best = torch.full((rows, *scores.shape[1:3]), _LEAST, device=q.device)
    if sinks is not None:
        best = sinks.view(kv_heads, -1).clamp(min=_LEAST).expand_as(best)
    index = owner[:, None, None].expand(-1, *scores.shape[1:3])
    first, best = best, best.scatter_reduce(0, index, scores.amax(-1), "amax")
    weights = torch.exp(scores - best[owner][..., None]) * seen[:, None, None, :]
    kept = weights if in_fp8 is None else fp8.rounded(weights, in_fp8.weight)
    mixed = torch.einsum("bhgs,bshd->bhgd", kept, values)
    total = torch.zeros_like(best) if sinks is None else torch.exp(first - best)
    total = total.index_add(0, owner, weights.sum(-1))
    out = torch.zeros((rows, *mixed.shape[1:]), device=q.device).index_add(0, owner, mixed)
    return (out / total.clamp(min=1e-30)[..., None]).to(q.dtype).flatten(1)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """scores `[rows, heads, queries, tokens]`, and a sink `[heads]` that takes its share and gives nothing."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def _read(cache: Tensor, block: Tensor | slice, place: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """Whole blocks of a cache, or one place in each, in the type that attention computes in."""
    stored = cache.view(torch.uint8) if cache.dtype is fp8.FP8 else cache
    found = stored[block] if place is None else stored[block, place]
    return (found.view(fp8.FP8).float() * scale).to(dtype) if cache.dtype is fp8.FP8 else found.to(dtype)


def as_paged(batch: Batch) -> Batch:
    """The same pass for kernels that read block tables and tiles of prompts; made on the device."""
    rows, device, lists = batch.seq_lens.shape[0], batch.seq_lens.device, batch.meta
    if isinstance(lists, BlockLists):
        assert lists.block_list is not None, "kernels that follow tables gain nothing from reading blocks in order"
        tables = lists.block_list[:, None]  # a row's table is what follows its start
        return replace(batch, meta=PagedMeta(tables, rows, [], [], 0, table_rows=lists.row_starts))
    length = row_length(batch)
    offsets = torch.arange(0, length, PREFILL_TILE, dtype=torch.int32, device=device)
    row = torch.arange(rows, dtype=torch.int32, device=device)[:, None].expand(-1, offsets.shape[0])
    at = offsets.expand(rows, -1)
    start = lists.starts[:, None].expand_as(at) if isinstance(lists, PromptParts) else torch.zeros_like(at)
    counts = (batch.seq_lens[:, None] - start - at).clamp(0, PREFILL_TILE)
    tiles = torch.stack((row, row * length + at, start + at, counts, start), dim=-1).flatten(0, 1)
    if isinstance(lists, PromptParts):
        meta = PagedMeta(lists.tables, 0, [], [], 0, row[:, 0], tiles, num_prefix_tiles=tiles.shape[0])
        return replace(batch, meta=meta)
    meta = PagedMeta(
        block_tables=batch.seq_lens[:, None],  # not read: nothing is cached before these prompts
        num_decode=0,
        chunk_starts_cpu=[0] * rows,
        chunk_ends_cpu=[length] * rows,
        max_seq_len=length,
        table_rows=row[:, 0],
        prefill_tiles=tiles,
    )
    return replace(batch, meta=meta)
