"""Every op of a model pass in plain torch: the definition that faster kernels are tested against.

Level 1. An op reads and writes tensors only. A device's `ops` starts as this module and overrides what is faster.
KV caches are `[blocks, block_size, kv_heads, head_dim]`.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.kernels.batch import ForwardBatch


def pack_linear(weight: Tensor) -> Tensor:
    """Bring a weight `[out, in]` into the form `linear` wants. Called once after loading."""
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[tokens, in]` times weight transposed -> `[tokens, out]`."""
    return F.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids `[tokens]`, weight `[vocab, hidden]` -> `[tokens, hidden]`."""
    return F.embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[tokens, hidden]`, normalised in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual, then normalise: (normalised, new residual)."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up `[tokens, 2 * width]` -> silu(gate) * up `[tokens, width]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gate_up `[tokens, 2 * width]` -> gelu(gate, tanh form) * up `[tokens, width]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x `[tokens, heads, head_dim]`; cos, sin `[tokens, 1, rotary_dim / 2]`."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotary_and_cache(
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor,  # [tokens, kv_heads, head_dim]
    v: Tensor,  # [tokens, kv_heads, head_dim]
    cos_sin: Tensor,  # [positions, rotary_dim] float32: cosines, then sines
    batch: ForwardBatch,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Rotate q and k by position, write k and v into the cache; return the rotated q."""
    cos, sin = cos_sin[batch.positions].to(q.dtype)[:, None, :].chunk(2, dim=-1)
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, batch.kv_index, rotate(k, cos, sin).to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, batch.kv_index, v.to(v_cache.dtype))
    return rotate(q, cos, sin)


def attention(
    q: Tensor,  # [tokens, heads, head_dim]
    k_cache: Tensor,
    v_cache: Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,  # a token sees itself and the `window - 1` tokens before it
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
) -> Tensor:
    """Causal attention of each row's query tokens over its cached tokens -> `[tokens, heads * head_dim]`."""
    if batch.table_rows is not None:
        tables = batch.block_tables[batch.table_rows.clamp(min=0).long()]
        seq_lens = batch.seq_lens.clamp(min=1)  # padding looks at one token of block 0
        batch = replace(batch, block_tables=tables, seq_lens=seq_lens, table_rows=None)
    out = torch.empty_like(q)
    n = batch.num_decode
    if n:
        out[:n] = _decode_attention(q[:n], k_cache, v_cache, batch, scale, window, softcap)
    token = n
    for row, (start, end) in enumerate(zip(batch.chunk_starts_cpu, batch.chunk_ends_cpu, strict=True), n):
        count = end - start
        keys = _gather(k_cache, batch.block_tables[row : row + 1], end)
        values = _gather(v_cache, batch.block_tables[row : row + 1], end)
        query_positions = torch.arange(start, end, device=q.device)
        mask = _mask(query_positions[None, :], end, window)
        out[token : token + count] = _attend(q[None, token : token + count], keys, values, mask, scale, softcap)[0]
        token += count
    return out.flatten(1)


def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    n = batch.num_decode
    # Past a row's end a block may hold anything, even NaN, and a weight of zero does not undo that.
    beyond = torch.arange(batch.max_seq_len, device=q.device) >= batch.seq_lens[:n, None]
    keys = _gather(k_cache, batch.block_tables[:n], batch.max_seq_len).masked_fill(beyond[..., None, None], 0)
    values = _gather(v_cache, batch.block_tables[:n], batch.max_seq_len).masked_fill(beyond[..., None, None], 0)
    mask = _mask(batch.seq_lens[:n, None] - 1, batch.max_seq_len, window)
    return _attend(q[:, None], keys, values, mask, scale, softcap)[:, 0]


def _gather(cache: Tensor, block_tables: Tensor, length: int) -> Tensor:
    """The first `length` cached tokens of each row -> `[rows, length, kv_heads, head_dim]`."""
    block_size = cache.shape[1]
    blocks = block_tables[:, : -(-length // block_size)].long()
    return cache[blocks].flatten(1, 2)[:, :length]


def _mask(query_positions: Tensor, length: int, window: int | None) -> Tensor:
    """query_positions `[rows, queries]` -> bool `[rows, 1, queries, length]`: may this query see this token."""
    tokens = torch.arange(length, device=query_positions.device)
    distance = query_positions[:, :, None] - tokens
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask[:, None]


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q `[rows, queries, heads, head_dim]`, keys and values `[rows, length, kv_heads, head_dim]` -> like q."""
    q, keys, values = q.transpose(1, 2), keys.transpose(1, 2).to(q.dtype), values.transpose(1, 2).to(q.dtype)
    if softcap is None:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
    groups = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = (q @ keys.transpose(-1, -2)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype)
    return (weights @ values).transpose(1, 2)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits `[rows, vocab]` float32 -> best token `[rows]` and its log-probability `[rows]`."""
    best, tokens = logits.max(dim=-1)
    return tokens, best - logits.logsumexp(dim=-1)
