"""Attention over latents (MLA) in plain torch: the definition.

A layer's cache is one tensor `[blocks, block_size, 1, c + r]`: of each token the normed latent (c), then the rotated
key that all heads share (r). Heads make their keys and values of the latent with `up [heads, p + v, c]`: p rows for the
part of a key that knows no positions, v rows for the value.

Absorbed: queries are taken through the rows of keys once (`absorb`), so that attention reads latents as they are, keys
and values alike, and its result is taken through the rows of values (`expand_values`).
"""

from typing import cast

import torch
from torch import Tensor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels.batch import Batch


def latent_attention(
    q: Tensor,  # [tokens, heads, p + r]
    latent: Tensor,  # [tokens, c + r]
    up: Tensor,  # [heads, p + v, c]
    norm: tuple[Tensor, float],  # weight [c] and epsilon
    cos_sin: Tensor,  # [positions, r] float32: cosines, then sines
    batch: Batch,
    cache: Tensor,
    scale: float,
) -> Tensor:
    """Norm the latents, rotate queries and the shared key, write latents and keys into the cache; then causal attention
    of each row's query tokens over its cached tokens -> `[tokens, heads * v]`. q and latent may be changed."""
    plain, size = q.shape[2] - cos_sin.shape[1], up.shape[2]
    latent_cache(q[..., plain:], latent, *norm, cos_sin, batch, cache)
    mixed = attend(absorb(q, up[:, :plain]), cache, batch, scale, size)
    return expand_values(mixed, up[:, plain:])


def latent_cache(
    q_rope: Tensor,  # [tokens, heads, r]
    latent: Tensor,  # [tokens, c + r]
    weight: Tensor,  # [c]
    eps: float,
    cos_sin: Tensor,  # [positions, r] float32: cosines, then sines
    batch: Batch,
    cache: Tensor,
) -> None:
    """Norm the latents, rotate q_rope and the shared key, all in place; write what `latent` holds into the cache."""
    size = weight.shape[0]
    cos, sin = cos_sin[batch.positions].to(q_rope.dtype)[:, None, :].chunk(2, dim=-1)
    q_rope.copy_(reference.rotate(q_rope, cos, sin))
    key = latent[:, None, size:]
    key.copy_(reference.rotate(key, cos, sin))
    latent[:, :size] = cast(Tensor, reference.rms_norm(latent[:, :size], weight, eps))
    cache.view(-1, cache.shape[-1]).index_copy_(0, batch.kv_index, latent.to(cache.dtype))


def absorb(q: Tensor, up: Tensor) -> Tensor:
    """q `[tokens, heads, p + r]`, up `[heads, p, c]` -> `[tokens, heads, c + r]`."""
    size = up.shape[1]
    absorbed = torch.bmm(q[..., :size].transpose(0, 1), up).transpose(0, 1)
    return torch.cat((absorbed, q[..., size:]), dim=-1)


def attend(q: Tensor, cache: Tensor, batch: Batch, scale: float, latent_dim: int) -> Tensor:
    """q `[tokens, heads, c + r]` -> `[tokens, heads, c]`: multi-query attention; the first c of a key are its value."""
    mixed = reference.attention(q, None, None, cache, cache[..., :latent_dim], batch, scale)
    return mixed.view(*q.shape[:2], latent_dim)


def expand_values(mixed: Tensor, up: Tensor) -> Tensor:
    """mixed `[tokens, heads, c]`, up `[heads, v, c]` -> `[tokens, heads * v]`."""
    return torch.bmm(mixed.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1).flatten(1)
