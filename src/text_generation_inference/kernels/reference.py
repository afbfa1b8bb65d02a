"""Every op of a model pass in plain torch: the definition that faster kernels are tested against.

An op reads and writes tensors only. A device's `ops` starts as this module and overrides what is faster.
KV caches are `[blocks, block_size, kv_heads, head_dim]`, in the model's type or in FP8 (`kernels.fp8`) with a
scale for all keys and one for all values of a layer. An op that is told a matrix (`quantize_for`) returns its result
quantised for that matrix.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels import block_lists, fp8, head_norms, low_bit
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.fp8 import AttentionScales, Fp8Weight
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import Product, Rows, Weight, plain


def pack_linear(weight: Tensor) -> Tensor:
    """Bring a weight `[out, in]` into the form `linear` wants. Called once after loading."""
    return weight


def linear(x: Rows, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x `[tokens, in]` times weight transposed -> `[tokens, out]` of x's type, or of `dtype` if weight is not plain."""
    if isinstance(weight, LowBitWeight):
        assert isinstance(x, Tensor)
        return low_bit.linear(x, weight, bias, dtype or x.dtype)
    if not isinstance(weight, Fp8Weight):
        assert isinstance(x, Tensor)
        return F.linear(x, plain(weight), bias)
    if isinstance(x, Tensor):
        return fp8.linear(fp8.quantize_rows(x, weight), weight, bias, dtype or x.dtype)
    return fp8.linear(x, weight, bias, dtype or weight.dtype)


def _pass_on(x: Tensor, quantize_for: Fp8Weight | None) -> Rows:
    return x if quantize_for is None else fp8.quantize_rows(x, quantize_for)


def logits(hidden: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """hidden `[tokens, hidden]` times weight `[vocab, hidden]` transposed, into `out` if there is one (float32)."""
    result = F.linear(hidden, plain(weight))
    return result if out is None else out.copy_(result)


def embedding(ids: Tensor, weight: Weight) -> Tensor:
    """ids `[tokens]`, weight `[vocab, hidden]` -> `[tokens, hidden]`."""
    return F.embedding(ids, plain(weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None) -> Rows:
    """x `[tokens, hidden]`, normalised in float32, rounded to the weight's type and multiplied in it."""
    return _pass_on(head_norms.rms_norm(x, weight, eps), quantize_for)


def add_rms_norm(
    x: Product, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
) -> tuple[Rows, Tensor]:
    """Add x to the residual, then normalise: (normalised, new residual)."""
    residual = residual + fp8.apply_scales(x)
    return rms_norm(residual, weight, eps, quantize_for), residual


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, quantize_for: Fp8Weight | None = None
) -> Rows:
    """x `[tokens, hidden]`: its mean subtracted, divided by its deviation, in float32."""
    return _pass_on(F.layer_norm(x, x.shape[-1:], weight, bias, eps), quantize_for)


def add_layer_norm(
    x: Product,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    quantize_for: Fp8Weight | None = None,
) -> tuple[Rows, Tensor]:
    """Add x to the residual, then normalise: (normalised, new residual)."""
    residual = residual + fp8.apply_scales(x)
    return layer_norm(residual, weight, bias, eps, quantize_for), residual


def gelu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    return _pass_on(F.gelu(fp8.apply_scales(x)), quantize_for)


def gelu_tanh(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gelu in its tanh form."""
    return _pass_on(F.gelu(fp8.apply_scales(x), approximate="tanh"), quantize_for)


def quick_gelu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gelu in its sigmoid form."""
    wide = fp8.apply_scales(x)
    return _pass_on(wide * torch.sigmoid(1.702 * wide), quantize_for)


def relu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    return _pass_on(F.relu(fp8.apply_scales(x)), quantize_for)


def silu(x: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    return _pass_on(F.silu(fp8.apply_scales(x)), quantize_for)


def gelu_mul(gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gate_up `[tokens, 2 * width]` -> gelu(gate) * up `[tokens, width]`."""
    gate, up = fp8.apply_scales(gate_up).chunk(2, dim=-1)
    return _pass_on(F.gelu(gate) * up, quantize_for)


def silu_mul(gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gate_up `[tokens, 2 * width]` -> silu(gate) * up `[tokens, width]`."""
    gate, up = fp8.apply_scales(gate_up).chunk(2, dim=-1)
    return _pass_on(F.silu(gate) * up, quantize_for)


def gelu_tanh_mul(gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
    """gate_up `[tokens, 2 * width]` -> gelu(gate, tanh form) * up `[tokens, width]`."""
    gate, up = fp8.apply_scales(gate_up).chunk(2, dim=-1)
    return _pass_on(F.gelu(gate, approximate="tanh") * up, quantize_for)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x `[tokens, heads, head_dim]`; cos, sin `[tokens, 1, rotary_dim / 2]`."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def keep_rows(values: Tensor, cache: Tensor, blocks: Tensor, inside: Tensor) -> None:
    """See `KeepRowsOp`."""
    cache[blocks, inside] = values


def picture_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, mask: Tensor) -> Tensor:
    """See `PictureAttentionOp`."""
    k, v = (cache[blocks.long()].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
    q = q.view(*mask.shape[:2], *q.shape[1:]).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


def rotate_heads(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k `[rows, heads, head_dim]`, rotated in float32; cos_sin `[rows, rotary_dim]`: cosines, then sines."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    return rotate(q.float(), cos, sin).to(q.dtype), rotate(k.float(), cos, sin).to(k.dtype)


def rotary_and_cache(
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor,  # [tokens, kv_heads, head_dim]
    v: Tensor,  # [tokens, kv_heads, head_dim]
    cos_sin: Tensor,  # [positions, rotary_dim] float32: cosines, then sines
    batch: Batch,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),  # of a cache in FP8
    scales: tuple[Tensor, Tensor] | None = None,  # of rows and columns of q, k, v side by side: see `ScaledRows`
    norms: HeadNorms | None = None,
    fp8_max: float = fp8.FP8_MAX,  # of the device's casts
) -> Tensor:
    """Rotate q and k by position, write k and v into the cache; return the rotated q.

    With a cache in FP8 k and v become what can be read from it. Where there are scales, they are applied to q, k and v;
    then, where there are norms, those to q and k.
    """
    if scales is not None:
        fp8.apply_scales_to_heads((q, k, v), *scales)
    if norms is not None:
        q, k = norms.apply(q, k)
    cos, sin = cos_sin[batch.positions].to(q.dtype)[:, None, :].chunk(2, dim=-1)
    _write(rotate(k, cos, sin), k, k_cache, batch.kv_index, kv_scales[0], fp8_max)
    _write(v, v, v_cache, batch.kv_index, kv_scales[1], fp8_max)
    return rotate(q, cos, sin)


def _write(values: Tensor, rounded: Tensor, cache: Tensor, index: Tensor, scale: float, fp8_max: float) -> None:
    """Values into the cache; what can be read from a cache in FP8 is left in `rounded`."""
    if cache.dtype is fp8.FP8:
        stored = fp8.to_fp8(values.float() / scale, fp8_max)
        rounded.copy_(_read(stored, scale, values.dtype))
        values, cache = stored.view(torch.uint8), cache.view(torch.uint8)
    block_size = cache.shape[1]
    cache[index // block_size, index % block_size] = values.to(cache.dtype)


def _read(stored: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What a cache holds, in the type that attention computes in."""
    return (stored.float() * scale).to(dtype) if stored.dtype is fp8.FP8 else stored.to(dtype)


def attention(
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor | None,  # [tokens, kv_heads, head_dim] that this step has put into the cache, as it holds them:
    v: Tensor | None,  # for kernels that would rather read them here
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    scale: float,
    window: int | None = None,  # a token sees itself and the `window - 1` tokens before it
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
    kv_scales: tuple[float, float] = (1.0, 1.0),  # of a cache in FP8
    slopes: Tensor | None = None,  # [heads] float32: times key's minus query's position, added to the scores (ALiBi)
    sinks: Tensor | None = None,  # [heads] float32: one more score for each query, of a token without a value
    attention_chunk: int | None = None,  # a token sees only tokens of its own run of so many positions
    in_fp8: AttentionScales | None = None,  # what is multiplied is put into FP8 with these
) -> Tensor:
    """Causal attention of each row's query tokens over its cached tokens -> `[tokens, heads * head_dim]`.

    Values may have another size than keys.
    """
    if block_lists.is_padded(batch):
        return block_lists.attention(
            q, k, v, k_cache, v_cache, batch, scale, window, softcap, kv_scales, slopes, sinks, attention_chunk, in_fp8
        )
    meta: PagedMeta = batch.meta
    seq_lens = batch.seq_lens
    prompts: list[tuple[Tensor, int, int, int]] = []  # blocks, first token, position of it, position after the last
    if meta.prefill_tiles is not None and not meta.chunk_starts_cpu:  # a padded step, which only the device describes
        tiles: list[list[int]] = meta.prefill_tiles[meta.prefill_tiles[:, 3] > 0].tolist()  # pyright: ignore
        prompts = [(meta.block_tables[slot, None], token, at, at + count) for slot, token, at, count, _ in tiles]
    if meta.table_rows is not None:
        tables = meta.block_tables[meta.table_rows.clamp(min=0).long()]
        seq_lens = seq_lens.clamp(min=1)  # padding looks at one token of block 0
        meta = replace(meta, block_tables=tables, table_rows=None)
    out = q.new_empty((*q.shape[:2], v_cache.shape[-1]))
    n = meta.num_decode
    if n:
        out[:n] = _decode_attention(
            q[:n], k_cache, v_cache, meta, seq_lens[:n], scale, window, softcap, kv_scales, slopes, sinks,
            attention_chunk, in_fp8,
        )  # fmt: skip
    token = n
    for row, (start, end) in enumerate(zip(meta.chunk_starts_cpu, meta.chunk_ends_cpu, strict=True), n):
        prompts.append((meta.block_tables[row, None], token, start, end))
        token += end - start
    size, reach = k_cache.shape[1], _reach(window, attention_chunk)
    for table, token, start, end in prompts:
        count = end - start
        behind = 0 if reach is None else max(0, start - reach + 1) // size  # blocks that may be another's by now
        first = behind * size
        keys = _read(_gather(k_cache, table[:, behind:], end - first), kv_scales[0], q.dtype)
        values = _read(_gather(v_cache, table[:, behind:], end - first), kv_scales[1], q.dtype)
        query_positions = torch.arange(start, end, device=q.device)[None, :]
        ends = batch.visible_ends[None, token : token + count] if batch.visible_ends is not None else None
        mask = _mask(query_positions, end, window, attention_chunk, first, ends)
        bias = _alibi(query_positions, end, slopes, first)
        queries = q[None, token : token + count]
        out[token : token + count] = _attend(queries, keys, values, mask, scale, softcap, bias, sinks, in_fp8)[0]
    return out.flatten(1)


def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: PagedMeta,
    seq_lens: Tensor,  # [decode rows]
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: tuple[float, float],
    slopes: Tensor | None,
    sinks: Tensor | None,
    attention_chunk: int | None,
    in_fp8: AttentionScales | None,
) -> Tensor:
    length, tables = meta.max_seq_len, meta.block_tables[: meta.num_decode]
    # Past a row's end a block may hold anything, even NaN, and a weight of zero does not undo that; so may one behind
    # its window, which may be another's by now.
    position = torch.arange(length, device=q.device)
    unseen = position >= seq_lens[:, None]
    reach = _reach(window, attention_chunk)
    if reach is not None:
        unseen |= position < seq_lens[:, None] - reach
    unseen = unseen[..., None, None]
    keys = _read(_gather(k_cache, tables, length), kv_scales[0], q.dtype).masked_fill(unseen, 0)
    values = _read(_gather(v_cache, tables, length), kv_scales[1], q.dtype).masked_fill(unseen, 0)
    query_positions = seq_lens[:, None] - 1
    mask = _mask(query_positions, length, window, attention_chunk)
    bias = _alibi(query_positions, length, slopes)
    return _attend(q[:, None], keys, values, mask, scale, softcap, bias, sinks, in_fp8)[:, 0]


def _gather(cache: Tensor, block_tables: Tensor, length: int) -> Tensor:
    """The first `length` cached tokens of each row -> `[rows, length, kv_heads, head_dim]`."""
    block_size = cache.shape[1]
    blocks = block_tables[:, : -(-length // block_size)].long()
    stored = cache.view(torch.uint8) if cache.dtype is fp8.FP8 else cache  # not every torch picks numbers in FP8
    return stored[blocks].flatten(1, 2)[:, :length].view(cache.dtype)


def _reach(window: int | None, attention_chunk: int | None) -> int | None:
    """How many tokens a query sees at most, itself included."""
    return min((bound for bound in (window, attention_chunk) if bound is not None), default=None)


def _mask(
    query_positions: Tensor,  # [rows, queries]
    end: int,
    window: int | None,
    attention_chunk: int | None,
    first: int = 0,
    visible_ends: Tensor | None = None,  # [rows, queries]
) -> Tensor:
    """bool `[rows, 1, queries, end - first]`: may this query see this token."""
    tokens = torch.arange(first, end, device=query_positions.device)
    distance = query_positions[:, :, None] - tokens
    mask = distance >= 0 if visible_ends is None else tokens < visible_ends[:, :, None]
    if window is not None:
        mask &= distance < window
    if attention_chunk is not None:
        mask &= tokens >= query_positions[:, :, None] // attention_chunk * attention_chunk
    return mask[:, None]


def _alibi(query_positions: Tensor, end: int, slopes: Tensor | None, first: int = 0) -> Tensor | None:
    """query_positions `[rows, queries]`, slopes `[heads]` -> `[rows, heads, queries, end - first]`, added to scores."""
    if slopes is None:
        return None
    distance = torch.arange(first, end, device=slopes.device) - query_positions[:, :, None]
    return distance[:, None] * slopes[:, None, None]


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *more: Any) -> Tensor:
    """q `[rows, queries, heads, head_dim]`, keys and values `[rows, length, kv_heads, head_dim]` -> like q."""
    q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    return block_lists.attend(q, keys, values, mask, *more).transpose(1, 2)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits `[rows, vocab]` float32 -> best token `[rows]` and its log-probability `[rows]`."""
    best, tokens = logits.max(dim=-1)
    return tokens, best - logits.logsumexp(dim=-1)
