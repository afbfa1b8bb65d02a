"""Layers of Llama 3.2 Vision that read pictures: `Batch.cross` says which tokens read which rows of which pictures.

Keys and values of pictures are made once, when these are computed, and stay as they are. Tokens of requests without
pictures are passed by; a batch that has no others passes the layers by as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.batch import Batch, CrossMeta
from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.layers.attention import SelfAttention
from text_generation_inference.layers.cache import CrossCacheSpec
from text_generation_inference.layers.linear import Linear, column_parts, row_linear
from text_generation_inference.layers.norm import NormSpec, RMSNorm
from text_generation_inference.models.feed_forward import DenseMlp
from text_generation_inference.models.layer import Cache, DecoderLayer
from text_generation_inference.models.model import Context
from text_generation_inference.models.spec import DenseSpec, LayerSpec, TensorNames
from text_generation_inference.models.vision.blocks import Parameter
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Part


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


class CrossAttention(SelfAttention):
    """Keeps keys and values of pictures in place of those of tokens, in the type that it computes in."""

    name = "cross_attn"

    def __init__(self, context: Context, spec: CrossSpec) -> None:
        ops, size, dim = context.ops, spec.hidden_size, spec.head_dim
        heads, kv_heads = context.parallel.split_heads(spec.num_heads, spec.num_kv_heads)
        kept, kept_kv = ((first * dim, end * dim) for first, end in (heads, kv_heads))
        norm, kv_size = NormSpec(eps=spec.eps), spec.num_kv_heads * dim
        self.ops, self.head_dim, self.num_kv_heads, self.dtype = ops, dim, kv_heads[1] - kv_heads[0], context.dtype
        self.q = Linear(ops, column_parts(["q_proj"], [spec.num_heads * dim], size, [kept]))
        self.kv = Linear(ops, column_parts(["k_proj", "v_proj"], [kv_size] * 2, size, [kept_kv] * 2))
        self.q_norm = RMSNorm(ops, Part("q_norm.weight", (dim,)), norm)
        self.k_norm = RMSNorm(ops, Part("k_norm.weight", (dim,)), norm)
        self.out = row_linear(ops, context.parallel, "o_proj", spec.num_heads * dim, size, kept, bias=False)

    @property
    def input_form(self) -> InputForm:
        return self.q.input_form

    @property
    def kind(self) -> object:
        return "cross", self.head_dim, self.num_kv_heads, self.q.kind, self.out.kind

    def cache_spec(self, dtype: torch.dtype) -> CrossCacheSpec:
        return CrossCacheSpec(self.num_kv_heads, self.head_dim, self.dtype)

    def keep(self, features: Tensor, blocks: Tensor, inside: Tensor, cache: Cache) -> None:
        """Keys and values of features `[rows, hidden]` go to these blocks of the cache, and places in them."""
        k, v = self.kv.forward(features).chunk(2, dim=1)
        k_cache, v_cache = cache
        self.ops.keep_rows(self._norm(self.k_norm, k), k_cache, blocks, inside)
        self.ops.keep_rows(v.unflatten(1, (-1, self.head_dim)), v_cache, blocks, inside)

    def forward(
        self, x: Rows, batch: Batch, cos_sin: Tensor, cache: tuple[Tensor, ...], wanted: Tensor | None = None
    ) -> Product:
        """x: of the tokens of `batch.cross` alone."""
        cross, (k_cache, v_cache) = batch.cross, cache
        assert cross is not None and wanted is None
        q = self._norm(self.q_norm, self.q.forward(x))
        read = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        count = cross.num_decode
        if cross.decode is not None:
            # A row that decodes reads all of its last pictures' rows: so it would if they were tokens before it.
            scale = self.head_dim**-0.5
            read[:count] = self.ops.attention(q[:count], None, None, k_cache, v_cache, cross.decode, scale)
        if cross.blocks is not None and cross.mask is not None:
            read = self.ops.picture_attention(q, k_cache, v_cache, cross.blocks, cross.mask)
        for reading in cross.readings:
            tokens = slice(reading.start, reading.end)
            read[tokens] = _attend(q[tokens], _rows(k_cache, reading.parts), _rows(v_cache, reading.parts))
        return self.out.forward(read)

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """`[rows, heads * dim]` -> `[rows, heads, dim]`."""
        normed = cast(Tensor, norm.forward(x.reshape(-1, self.head_dim)))
        return normed.view(x.shape[0], -1, self.head_dim)


class CrossLayer(DecoderLayer):
    """x += gate * A(n1 x); x += gate * M(n2 x), both for tokens that read pictures alone."""

    attention: CrossAttention

    def __init__(self, context: Context, spec: CrossSpec, layer: LayerSpec, name: str, number: int) -> None:
        """`layer`: of the layer of self-attention in whose place it is."""
        self.name, self.number, self.spec = name, number, layer
        norm = NormSpec(eps=spec.eps)
        feed_forward = DenseSpec(width=spec.width, activation=spec.activation)
        self.attention = CrossAttention(context, spec)
        self.norm = RMSNorm(context.ops, Part("input_layernorm.weight", (spec.hidden_size,)), norm)
        self.attention_gate = Parameter("cross_attn_attn_gate", (1,))
        self.mlp = DenseMlp(context, feed_forward, spec.hidden_size, TensorNames())
        self.mlp_norm = RMSNorm(context.ops, Part("post_attention_layernorm.weight", (spec.hidden_size,)), norm)
        self.mlp_gate = Parameter("cross_attn_mlp_gate", (1,))

    def keep_pictures(self, features: Tensor, blocks: Tensor, inside: Tensor, cache: Cache) -> None:
        self.attention.keep(features, blocks, inside, cache)

    def forward(
        self, x: Product, residual: Tensor | None, batch: Batch, cos_sin: Tensor, cache: Cache, wanted: Tensor | None
    ) -> tuple[Product, Tensor | None]:
        cross = batch.cross
        if cross is None and wanted is None:
            return x, residual
        stream = apply_scales(x) if residual is None else residual + apply_scales(x)
        if cross is not None:
            tokens = cross.tokens
            changed = self._read(stream if tokens is None else stream[tokens], batch, cross, cos_sin, cache)
            stream = changed if tokens is None else stream.index_copy(0, tokens, changed)
        return stream if wanted is None else stream[wanted], None

    def _read(self, x: Tensor, batch: Batch, cross: CrossMeta, cos_sin: Tensor, cache: Cache) -> Tensor:
        mixed = self.attention.forward(self.norm.forward(x, self.attention.input_form), batch, cos_sin, cache)
        after = x + self.attention_gate.value.tanh() * apply_scales(mixed)
        added = apply_scales(self.mlp.forward(self.mlp_norm.forward(after, self.mlp.input_form)))
        after = torch.where(cross.feeds, after + self.mlp_gate.value.tanh() * added, after)
        return torch.where(cross.reads, after, x)


def _rows(cache: Tensor, parts: Sequence[tuple[Tensor, int, int]]) -> Tensor:
    """`[rows, kv heads, dim]`, one part after the other."""
    found = [cache[blocks].flatten(0, 1)[first:end] for blocks, first, end in parts]
    return torch.cat(found) if len(found) > 1 else found[0]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1).flatten(1)
