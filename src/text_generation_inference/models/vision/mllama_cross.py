"""Layers of Llama 3.2 Vision that read pictures, and which rows of which pictures a token reads.

Keys and values of a request's pictures are made once, and stay as they are. Rows of real tiles come first, picture by
picture, then those of missing tiles: so what a token reads is one run of them. Without pictures the layers do nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.partial_sum import PartialSum
from text_generation_inference.layers.linear import Linear, column_parts, row_linear
from text_generation_inference.layers.norm import NormSpec, RMSNorm
from text_generation_inference.models.feed_forward import DenseMlp
from text_generation_inference.models.model import Context
from text_generation_inference.models.spec import DenseSpec, TensorNames
from text_generation_inference.models.vision.blocks import Parameter
from text_generation_inference.weights.declare import Module, Part


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens of a request that read the same rows of its pictures."""

    start: int  # of the request's tokens
    end: int
    first_row: int
    end_row: int
    has_picture: bool  # else they come before all pictures: they read every row, and the feed-forward passes them by


def find_readings(places: Sequence[int], counts: Sequence[int], num_rows: int, num_tokens: int) -> list[Reading]:
    """What the tokens of a request read.

    places: of the tokens that stand for pictures. counts: rows of real tiles of each picture. num_rows: of all tiles.
    A token reads the last picture before it, and those that stand right before that one.
    """
    if not places:
        return []
    readings: list[Reading] = []
    if places[0] > 0:
        readings.append(Reading(0, places[0], 0, num_rows, False))
    first_row = end_row = 0
    for number, (place, count) in enumerate(zip(places, counts, strict=True)):
        if number and places[number - 1] != place - 1:
            first_row = end_row
        end_row += count
        end = places[number + 1] if number + 1 < len(places) else num_tokens
        readings.append(Reading(place, end, first_row, end_row, True))
    return readings


def join_features(features: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Of all pictures of a request: rows of real tiles, then those of missing ones."""
    pairs = list(zip(features, counts, strict=True))
    return torch.cat([*(each[:count] for each, count in pairs), *(each[count:] for each, count in pairs)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSpec:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    width: int  # of the feed-forward
    activation: str  # as ops call it
    eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class _CrossAttention(Module):
    name = "cross_attn"

    def __init__(self, context: Context, spec: CrossSpec) -> None:
        ops, size, dim = context.ops, spec.hidden_size, spec.head_dim
        heads, kv_heads = context.parallel.split_heads(spec.num_heads, spec.num_kv_heads)
        kept, kept_kv = ((first * dim, end * dim) for first, end in (heads, kv_heads))
        norm, kv_size = NormSpec(eps=spec.eps), spec.num_kv_heads * dim
        self.head_dim = dim
        self.q = Linear(ops, column_parts(["q_proj"], [spec.num_heads * dim], size, [kept]))
        self.kv = Linear(ops, column_parts(["k_proj", "v_proj"], [kv_size] * 2, size, [kept_kv] * 2))
        self.q_norm = RMSNorm(ops, Part("q_norm.weight", (dim,)), norm)
        self.k_norm = RMSNorm(ops, Part("k_norm.weight", (dim,)), norm)
        self.out = row_linear(ops, context.parallel, "o_proj", spec.num_heads * dim, size, kept, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        """-> `[tokens, heads, dim]`."""
        return self._norm(self.q_norm, self.q.forward(x)).unflatten(0, (x.shape[0], -1))

    def keys_values(self, features: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.kv.forward(features).chunk(2, dim=1)
        k = self._norm(self.k_norm, k).unflatten(0, (features.shape[0], -1))
        return k, v.unflatten(1, (-1, self.head_dim)).contiguous()

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return cast(Tensor, norm.forward(x.reshape(-1, self.head_dim)))


class CrossLayer(Module):
    """x += gate * A(n1 x); x += gate * M(n2 x), both for tokens that read pictures alone."""

    def __init__(self, context: Context, spec: CrossSpec, name: str) -> None:
        self.name = name
        norm = NormSpec(eps=spec.eps)
        feed_forward = DenseSpec(width=spec.width, activation=spec.activation)
        self.attention = _CrossAttention(context, spec)
        self.norm = RMSNorm(context.ops, Part("input_layernorm.weight", (spec.hidden_size,)), norm)
        self.attention_gate = Parameter("cross_attn_attn_gate", (1,))
        self.mlp = DenseMlp(context, feed_forward, spec.hidden_size, TensorNames())
        self.mlp_norm = RMSNorm(context.ops, Part("post_attention_layernorm.weight", (spec.hidden_size,)), norm)
        self.mlp_gate = Parameter("cross_attn_mlp_gate", (1,))

    def keys_values(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Of a request's pictures (`join_features`): this rank's heads, `[rows, kv heads, dim]` each."""
        return self.attention.keys_values(features)

    def forward(self, x: Tensor, k: Tensor, v: Tensor, readings: Sequence[Reading], start: int = 0) -> Tensor:
        """x: the stream of a request's tokens from `start` on, `[tokens, hidden]`; readings: of these or of all."""
        end = start + x.shape[0]
        q = self.attention.queries(cast(Tensor, self.norm.forward(x)))
        read = torch.empty(x.shape[0], q.shape[1] * q.shape[2], dtype=x.dtype, device=x.device)
        reads = torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device)
        for each in readings:
            tokens = slice(max(each.start, start) - start, min(each.end, end) - start)
            if tokens.start >= tokens.stop:
                continue
            rows = slice(each.first_row, each.end_row)
            read[tokens] = _attend(q[tokens], k[rows], v[rows])
            if not each.has_picture:
                reads[tokens] = 0
        x = x + self.attention_gate.value.tanh() * self.attention.out.forward(read)
        added = self.mlp.forward(self.mlp_norm.forward(x))
        added = added.ranks.all_reduce(added.data) if isinstance(added, PartialSum) else apply_scales(added)
        return x + self.mlp_gate.value.tanh() * (reads * added)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1).flatten(1)
