"""Rotation, the cache and attention on Gaudi, over padded passes.

Prompts go through the fused attention op, which reads the keys and values of the pass itself. Decoding looks
at each cached block by itself with the query of the row that owns it, then adds up the blocks of a row: a product with
a 0/1 matrix, which keeps the matrix engine busy where a scatter would not. In memory a cache is
`[blocks * block_size, kv_heads, head_dim]`, written by `index_copy_` on the whole tensor: in-place writes to a view of
it would copy it. With scales for it both products of attention are computed in FP8, of blocks as a cache in FP8 has
them.

A cache holds no value that is no number: a token with such a value has a key that is none, so that whoever looks at it
learns. So values need no mask, which would write all of them once more: what is not seen counts nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels import latent as definition
from text_generation_inference.kernels import reference
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import (
    BlockLists,
    PromptParts,
    WholePrompts,
    context_of,
    is_padded,
    prompt_mask,
    row_length,
)
from text_generation_inference.kernels.fp8 import FP8, AttentionScales, apply_scales_to_heads
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.hpu.bridge import Bridge
from text_generation_inference.kernels.hpu.fp8 import CardAttentionScales, Fp8Ops
from text_generation_inference.kernels.hpu.pass_memo import PassMemo

# Below any score. Not -inf: a block outside the window has nothing else, and inf - inf is no number. A power of two,
# which is the same number in every type: a maximum that is rounded must not be less.
_LEAST = -(2.0**100)
_ADJUSTS_SINCE = (1, 22, 0, 494)  # vLLM takes the op from this release on


class HpuAttention:
    def __init__(
        self,
        bridge: Bridge,
        fp8: Fp8Ops,
        memo: PassMemo,
        flash: bool = True,
        recompute: bool = True,
        wide_softmax: bool = True,
    ) -> None:
        self._bridge = bridge
        self._once = memo.once
        self._fp8 = fp8
        self._flash = flash
        self._recompute = recompute
        self._wide_softmax = wide_softmax  # scores of decoding in float32 rather than the model's type
        self._adjust = _find_adjustment(bridge)
        self._own: tuple[Tensor, Tensor] | None = None  # keys and values of the layer that is running, as cached

    # -- positions and the cache -----------------------------------------------------------------------------------

    def rotary_and_cache(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, head_dim]
        cos_sin: Tensor,  # [positions, rotary_dim] float32: cosines, then sines
        batch: Batch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        scales: tuple[Tensor, Tensor] | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        if not is_padded(batch):  # without buckets, each step is compiled anew
            largest = self._bridge.fp8_max
            return reference.rotary_and_cache(
                q, k, v, cos_sin, batch, k_cache, v_cache, kv_scales, scales, norms, largest
            )
        if scales is not None:
            apply_scales_to_heads((q, k, v), *scales)
        if norms is not None:
            q, k = norms.apply(q, k)
        self._bridge.mark_step()  # once in a layer: all layers are then the same piece
        angles = lambda: _angles(cos_sin, batch, q.dtype)  # noqa: E731
        cos, sin = self._once(batch.meta, "angles", q.dtype, angles, (cos_sin, batch.positions))
        finite = torch.isfinite(v)
        k = self._rotate(k, cos, sin).masked_fill(~finite.all(-1, keepdim=True), math.nan)
        keys = self._write(k, k_cache, batch.kv_index, kv_scales[0])
        values = self._write(torch.where(finite, v, 0), v_cache, batch.kv_index, kv_scales[1])
        self._own = None if isinstance(batch.meta, BlockLists) else (keys, values)
        return self._rotate(q, cos, sin)

    def latent_attention(
        self,
        q: Tensor,  # [tokens, heads, p + r]
        latent: Tensor,  # [tokens, c + r]
        up: Tensor,  # [heads, p + v, c]
        norm: tuple[Tensor, float],
        cos_sin: Tensor,
        batch: Batch,
        cache: Tensor,
        scale: float,
    ) -> Tensor:
        if is_padded(batch):
            self._bridge.mark_step()  # once in a layer: all layers are then the same piece
        return definition.latent_attention(q, latent, up, norm, cos_sin, batch, cache, scale)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kernels, width = self._bridge.kernels, cos.shape[-1]
        half_turn = kernels.RotaryPosEmbeddingMode.BLOCKWISE
        if width == x.shape[-1]:
            return kernels.apply_rotary_pos_emb(x, cos, sin, None, 0, half_turn)
        turned = kernels.apply_rotary_pos_emb(x[..., :width], cos, sin, None, 0, half_turn)
        return torch.cat((turned, x[..., width:]), dim=-1)

    def _write(self, values: Tensor, cache: Tensor, index: Tensor, scale: float) -> Tensor:
        """Into the cache; returns what can be read from it."""
        stored = values.to(cache.dtype) if cache.dtype is not FP8 else self._fp8.to_cache(values, scale)
        flat = _flat(cache)
        flat.index_copy_(0, index, stored.view(flat.dtype))
        return values if cache.dtype is not FP8 else self._fp8.from_cache(stored, scale, values.dtype)

    def _read(self, cache: Tensor, blocks: Tensor | int, scale: float, dtype: torch.dtype) -> Tensor:
        """These blocks, or so many of the first -> `[blocks, kv_heads, block_size, head_dim]`"""
        found = _find_blocks(cache, blocks)
        found = found.to(dtype) if cache.dtype is not FP8 else self._fp8.from_cache(found.view(FP8), scale, dtype)
        return found.transpose(1, 2)

    def _read_fp8(self, cache: Tensor, blocks: Tensor | int, scale: float) -> Tensor:
        """The same in FP8, with this scale."""
        found = _find_blocks(cache, blocks)
        return (found.view(FP8) if cache.dtype is FP8 else self._fp8.to_cache(found, scale)).transpose(1, 2)

    # -- attention -------------------------------------------------------------------------------------------------

    def attention(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor | None,  # not rotated: what `rotary_and_cache` has made of it is kept here
        v: Tensor | None,
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
        """See `kernels.reference.attention`."""
        if slopes is not None or sinks is not None or attention_chunk is not None:
            self._own = None  # nothing is multiplied in FP8: the definition casts as other devices do
            return reference.attention(
                q, k, v, k_cache, v_cache, batch, scale, window, softcap, kv_scales, slopes, sinks, attention_chunk
            )
        if isinstance(batch.meta, BlockLists):
            of_tokens = k is not None  # values of pictures are not written here
            return self._decode_attention(
                q, k_cache, v_cache, batch, scale, window, softcap, kv_scales, of_tokens, in_fp8
            )
        if isinstance(batch.meta, (WholePrompts, PromptParts)):  # of a union torch 2.7's compiler can make nothing
            return self._prefill_attention(q, k_cache, v_cache, batch, scale, window, softcap, kv_scales, in_fp8)
        return reference.attention(q, k, v, k_cache, v_cache, batch, scale, window, softcap, kv_scales)

    def _prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        scale: float,
        window: int | None,
        softcap: float | None,
        kv_scales: tuple[float, float],
        in_fp8: AttentionScales | None,
    ) -> Tensor:
        """Causal attention of prompts over themselves and what is cached before -> `[tokens, heads * head_dim]`."""
        assert self._own is not None, "rotary_and_cache comes first"
        keys, values = self._own
        self._own = None
        rows, length, size = batch.seq_lens.shape[0], row_length(batch), k_cache.shape[1]
        q, keys, values = (x.reshape(rows, length, *x.shape[1:]).transpose(1, 2) for x in (q, keys, values))
        context = self._once(batch.meta, "context", size, lambda: context_of(batch, size))
        if context is not None:
            blocks, seen = context.blocks.reshape(-1), context.seen[:, None, :, None]
            before = [
                _join_blocks(self._read(cache, blocks, scale, q.dtype), rows)
                for cache, scale in ((k_cache, kv_scales[0]), (v_cache, kv_scales[1]))
            ]
            # What is not seen may be anything, even no number, and a weight of zero does not undo that.
            keys, values = (
                torch.cat((torch.where(seen, x, 0), own), dim=2) for x, own in zip(before, (keys, values), strict=True)
            )
        if self._wants_mask(batch, window, softcap):
            mask = self._once(batch.meta, "mask", window, lambda: prompt_mask(batch, size, window)[0])
            if softcap is not None or not self._flash:
                out = self._matmul_attention(q, keys, values, mask[:, None, None], scale, softcap, in_fp8)
            else:
                out = self._sdpa(q, keys, values, mask[:, None].expand(rows, 1, -1, -1), False, scale, None, in_fp8)
        else:
            # Rows of padding look at their first token: with nothing to look at, they would have no numbers.
            lengths = self._once(batch.meta, "lengths", None, lambda: batch.seq_lens.clamp(min=1))
            out = self._sdpa(q, keys, values, None, True, scale, lengths, in_fp8)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    # -- pictures that layers of cross-attention read --------------------------------------------------------------

    def keep_rows(self, values: Tensor, cache: Tensor, blocks: Tensor, inside: Tensor) -> None:
        _flat(cache).index_copy_(0, blocks * cache.shape[1] + inside, values)

    def picture_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, mask: Tensor) -> Tensor:
        rows, scale = blocks.shape[0], q.shape[-1] ** -0.5
        keys, values = (
            _join_blocks(self._read(cache, blocks.reshape(-1), 1.0, q.dtype), rows) for cache in (k_cache, v_cache)
        )
        q = q.view(rows, -1, *q.shape[1:]).transpose(1, 2)
        if self._flash:
            out = self._sdpa(q, keys, values, mask[:, None], False, scale, None)
        else:
            out = self._matmul_attention(q, keys, values, mask[:, None, None], scale)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _wants_mask(self, batch: Batch, window: int | None, softcap: float | None) -> bool:
        """The fused op takes lengths with the causal mask alone."""
        narrow = isinstance(batch.meta, PromptParts) or (window is not None and window < row_length(batch))
        return softcap is not None or not self._flash or narrow

    def hand_over(
        self,
        batch: Batch,
        cos_sin: Tensor | None,  # None: nothing is rotated
        block_size: int,
        dtype: torch.dtype,  # of the stream
        window: int | None,
        softcap: float | None,
        program: Callable[..., Any],  # (function, *its arguments): computed as one
    ) -> None:
        """To a layer that is compiled by itself: what it reads of the pass's lists, computed once for all layers."""
        meta, once = batch.meta, self._once
        known: dict[str, Any] = {}
        if cos_sin is not None:
            angles = lambda: program(_angles, cos_sin, batch, dtype)  # noqa: E731
            known["angles"] = once(meta, "angles", dtype, angles, (cos_sin, batch.positions))
        if isinstance(meta, BlockLists):
            groups, rows = meta.block_groups, batch.seq_lens.shape[0]
            about = once(meta, "owners", dtype, lambda: _Owners(program(_owners, groups, rows, dtype)))
            seen = lambda: program(_seen, batch, about.mapping, block_size, window)  # noqa: E731
            known |= {"owners": about, "seen": once(meta, "seen", window, seen)}
        elif self._wants_mask(batch, window, softcap):
            mask = lambda: program(prompt_mask, batch, block_size, window)[0]  # noqa: E731
            known["mask"] = once(meta, "mask", window, mask)
            if isinstance(meta, PromptParts):
                context = lambda: program(context_of, batch, block_size)  # noqa: E731
                known["context"] = once(meta, "context", block_size, context)
        else:
            known["lengths"] = once(meta, "lengths", None, lambda: batch.seq_lens.clamp(min=1))
        meta.known = known

    def _sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        lengths: Tensor | None,
        in_fp8: AttentionScales | None = None,
    ) -> Tensor:
        kernels = self._bridge.kernels
        if not isinstance(in_fp8, CardAttentionScales):
            apply = kernels.FusedSDPA.apply  # takes arguments by position alone
            return apply(q, k, v, mask, 0.0, causal, scale, "None", self._recompute, lengths, "right")
        pairs = ((q, in_fp8.query), (k, in_fp8.key), (v, in_fp8.value))
        result = kernels.fp8_fused_sdpa(
            *(self._fp8.to_cache(x, each) for x, each in pairs),
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            softmax_mode="None",
            d_scale_q=in_fp8.query_there,
            d_scale_k=in_fp8.key_there,
            d_scale_v=in_fp8.value_there,
            q_scale_s=in_fp8.weight_inverse,
            d_scale_s=in_fp8.weight_there,  # without a scale for it the result is not in FP8
            is_amax_s=False,
            valid_seq_len=lengths,
            seq_padding_type="right",
        )  # whether it recomputes is its own business: Intel's toolkit does not say so either
        return result[0].to(q.dtype)

    def _matmul_attention(
        self,
        q: Tensor,  # [rows, heads, length, head_dim]
        k: Tensor,  # with fewer heads
        v: Tensor,
        mask: Tensor,  # of five dimensions
        scale: float,
        softcap: float | None = None,
        in_fp8: AttentionScales | None = None,
    ) -> Tensor:
        """-> like q."""
        (rows, _, length, size), kv_heads = q.shape, k.shape[1]
        grouped = q.reshape(rows, kv_heads, -1, length, size)
        if in_fp8 is None:
            scores = (grouped @ k[:, :, None].transpose(-1, -2)).float() * scale
        else:  # heads of a group are rows of one product
            pairs = ((q.reshape(rows, kv_heads, -1, size), in_fp8.query), (k, in_fp8.key))
            queries, keys = (self._fp8.to_cache(x, each) for x, each in pairs)
            scores = self._fp8.multiply(queries, keys, True, (in_fp8.query * scale, in_fp8.key), torch.float32)
            scores = scores.view(*grouped.shape[:4], -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -math.inf)
        if in_fp8 is None:
            return (scores.softmax(-1).to(q.dtype) @ v[:, :, None]).flatten(1, 2)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        pairs = ((weights.flatten(2, 3).to(q.dtype), in_fp8.weight), (v, in_fp8.value))
        rounded, values = (self._fp8.to_cache(x, each) for x, each in pairs)
        mixed = self._fp8.multiply(rounded, values, False, (in_fp8.weight, in_fp8.value), q.dtype)
        return (mixed.view(grouped.shape) / weights.sum(-1, keepdim=True)).to(q.dtype).flatten(1, 2)

    def _decode_attention(
        self,
        q: Tensor,  # [rows, heads, head_dim]
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        scale: float,
        window: int | None,
        softcap: float | None,
        kv_scales: tuple[float, float],
        of_tokens: bool,
        in_fp8: AttentionScales | None,
    ) -> Tensor:
        """Attention of each row's one token over its blocks -> `[rows, heads * head_dim]`; padding gets 0."""
        lists: BlockLists = batch.meta
        kv_heads, rows, groups = k_cache.shape[2], batch.seq_lens.shape[0], lists.block_groups
        about = self._once(batch.meta, "owners", q.dtype, lambda: _Owners(_owners(groups, rows, q.dtype)))
        seen = self._once(batch.meta, "seen", window, lambda: _seen(batch, about.mapping, k_cache.shape[1], window))
        blocks = groups.shape[0] if lists.block_list is None else lists.block_list
        shape = (len(groups), kv_heads, -1, q.shape[-1])
        if in_fp8 is None:
            keys = self._read(k_cache, blocks, kv_scales[0], q.dtype)
            values = self._read(v_cache, blocks, kv_scales[1], q.dtype)
            if not of_tokens:  # what is not seen may be anything, and a weight of zero does not make it a number
                values = torch.where(seen[:, None, :, None], values, 0)
            queries = (q * scale).index_select(0, about.rows).view(shape)
            scores = queries @ keys.transpose(-1, -2)  # [blocks, kv_heads, group, block_size]
            scores = scores.float() if self._wide_softmax else scores
        else:
            keys = self._read_fp8(k_cache, blocks, in_fp8.key)
            values = self._read_fp8(v_cache, blocks, in_fp8.value)
            queries = self._fp8.to_cache(q.index_select(0, about.rows).view(shape), in_fp8.query)
            dtype = torch.float32 if self._wide_softmax else q.dtype
            scores = self._fp8.multiply(queries, keys, True, (in_fp8.query * scale, in_fp8.key), dtype)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(seen[:, None, None, :], scores, _LEAST)
        largest = scores.amax(-1, keepdim=True)
        adjusts = self._adjust is not None and q.dtype is torch.bfloat16
        if adjusts:  # what the card's op reads: weights are then relative to the rounded maximum, too
            largest = largest.bfloat16()
        weights = torch.exp(scores - largest)
        sums = weights.sum(-1, keepdim=True)
        factors = self._adjusted(largest, sums, about) if adjusts else _join(largest, sums, about)
        if in_fp8 is None:
            mixed = weights.to(q.dtype) @ values
        else:
            rounded = self._fp8.to_cache(weights.to(q.dtype), in_fp8.weight)
            mixed = self._fp8.multiply(rounded, values, False, (in_fp8.weight, in_fp8.value), q.dtype)
        mixed = mixed * factors.to(q.dtype)
        return _add_up(mixed.flatten(1), about)

    def _adjusted(self, largest: Tensor, sums: Tensor, about: "_Owners") -> Tensor:
        """See `_join`, by the card's op. It is tested in bfloat16: its float32 is not, by those who make it."""
        shape, count = (*largest.shape, 1), about.num_rows + 1  # the op wants five dimensions
        return self._adjust(largest.view(shape), sums.bfloat16().view(shape), about.groups, count).view(largest.shape)


def _find_adjustment(bridge: Bridge) -> Any:
    """The card's op for joining blocks, where the software has one that is known to be right."""
    if bridge.generation < 3 or bridge.version < _ADJUSTS_SINCE:
        return None
    return getattr(torch.ops.hpu, "block_softmax_adjustment", None)


class _Owners:
    """Whose the blocks of a pass are, in the forms that decode attention needs."""

    def __init__(self, found: tuple[Tensor, ...]) -> None:
        self.rows, self.groups, self.wide_groups, self.mapping, self._wide = found
        self.num_rows = self.mapping.shape[1]

    def mapping_in(self, dtype: torch.dtype) -> Tensor:
        if dtype is self.mapping.dtype:
            return self.mapping
        return self._wide if dtype is torch.float32 else self._wide.to(dtype)


def _owners(groups: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `_Owners` has, as tensors alone."""
    rows = groups.clamp(min=0)  # whose query looks at each; at fillers anybody's
    owned = torch.where(groups < 0, num_rows, groups)  # fillers have a group of their own
    mapping = (groups[:, None] == torch.arange(num_rows, device=groups.device)).to(dtype)  # [blocks, rows]
    return rows, owned, owned.long(), mapping, mapping.float()


def _angles(cos_sin: Tensor, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens, in full width."""
    cos, sin = cos_sin.index_select(0, batch.positions).to(dtype)[:, None, :].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def _join(largest: Tensor, sums: Tensor, about: _Owners) -> Tensor:
    """What each block's result is multiplied with so that the blocks of a row add up to a softmax."""
    best = torch.full((about.num_rows + 1, *largest.shape[1:]), _LEAST, dtype=largest.dtype, device=largest.device)
    best = best.index_reduce_(0, about.wide_groups, largest, "amax")
    change = torch.exp(largest - best.index_select(0, about.groups))
    scaled = (sums * change).flatten(1)
    total = about.mapping_in(scaled.dtype) @ _sum_rows(scaled, about)
    return change / torch.maximum(total, scaled).view(change.shape)  # a filler's total is 0 by itself


def _sum_rows(x: Tensor, about: _Owners) -> Tensor:
    """x `[blocks, width]` added up by row; what is no number counts nothing."""
    return about.mapping_in(x.dtype).transpose(0, 1) @ torch.where(torch.isfinite(x), x, 0)


def _add_up(x: Tensor, about: _Owners) -> Tensor:
    """x `[blocks, width]` -> `[rows, width]`. A row that has something that is no number becomes that, no other does:
    zero times it is not zero, and every row's sum runs over all blocks."""
    broken = (~torch.isfinite(x)).any(-1, keepdim=True).to(x.dtype)
    return _sum_rows(x, about).masked_fill(_sum_rows(broken, about) > 0, math.nan)


def _find_blocks(cache: Tensor, blocks: Tensor | int) -> Tensor:
    """These blocks, or so many of the first -> `[blocks, block_size, kv_heads, head_dim]` as they are stored."""
    flat = _flat(cache)
    whole = flat.view(-1, cache.shape[1], *flat.shape[1:])
    return whole[:blocks] if isinstance(blocks, int) else whole.index_select(0, blocks)


def _flat(cache: Tensor) -> Tensor:
    """`[blocks * block_size, kv_heads, head_dim]`: the tensor that the cache is a view of, where the device made it."""
    base = cache._base
    return base if base is not None and base.dim() == 3 and base.dtype is cache.dtype else cache.flatten(0, 1)


def _seen(batch: Batch, mapping: Tensor, block_size: int, window: int | None) -> Tensor:
    """bool `[blocks, block_size]`: which places of its blocks a row's token looks at."""
    lists: BlockLists = batch.meta
    mapping = mapping.float()
    place = torch.arange(block_size, device=mapping.device)
    seen = (place < lists.block_usage[:, None]) & (lists.block_groups >= 0)[:, None]
    if window is None:
        return seen
    # Products with the mapping rather than look-ups by -1. float32 holds these integers exactly.
    length = mapping @ batch.seq_lens.float()
    if lists.block_numbers is not None:
        number = lists.block_numbers
    else:
        assert lists.row_starts is not None
        number = torch.arange(mapping.shape[0], device=mapping.device) - mapping @ lists.row_starts.float()
    return seen & (number[:, None] * block_size + place >= (length - window)[:, None])


def _join_blocks(x: Tensor, rows: int) -> Tensor:
    """`[rows * blocks, kv_heads, block_size, head_dim]` -> `[rows, kv_heads, blocks * block_size, head_dim]`"""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)
