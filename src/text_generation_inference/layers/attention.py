"""Self-attention over the paged cache: what a layer asks of it, and the kind that keeps keys and values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fp8 import AttentionScales, split_scales
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.cache import AnyCacheSpec, CacheSpec
from text_generation_inference.layers.head_norm import HeadNorm, NormOver
from text_generation_inference.layers.linear import Linear
from text_generation_inference.quant.cache_scales import CacheScales
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Declared, Float32Tensors, Module, Part


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """This rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    rotary_dim: int = 0
    attention_chunk: int | None = None  # a token sees only tokens of its own run of so many positions


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries far into a sequence are made longer: by 1 + scale * ln(1 + floor((position + 1) / floor_scale))."""

    scale: float
    floor_scale: float

    def build_table(self, num_positions: int, device: torch.device) -> Tensor:
        """`[num_positions]` float32."""
        steps = ((torch.arange(num_positions, dtype=torch.float32) + 1.0) / self.floor_scale).floor()
        return (steps.log1p() * self.scale + 1.0).to(device)


class SelfAttention(Module, ABC):
    @property
    @abstractmethod
    def input_form(self) -> InputForm:
        """What the norm before it should quantise its result for."""

    @property
    @abstractmethod
    def kind(self) -> object:
        """Attentions of the same kind run the same kernels."""

    @abstractmethod
    def cache_spec(self, dtype: torch.dtype) -> AnyCacheSpec:
        """What it keeps, in this type."""

    @abstractmethod
    def forward(
        self, x: Rows, batch: Batch, cos_sin: Tensor, cache: tuple[Tensor, ...], wanted: Tensor | None = None
    ) -> Product:
        """x `[tokens, hidden]` -> `[tokens, hidden]` of all tokens, or of those `wanted`; all go into the cache."""


class Attention(SelfAttention):
    """Keeps the keys and values of its heads."""

    def __init__(self, ops: Ops, name: str, qkv: Linear, out: Linear, heads: HeadLayout) -> None:
        self.ops = ops
        self.name = name
        self.qkv = qkv
        self.out = out
        self.heads = heads
        self.cache_scales = CacheScales(heads.scale)
        self.in_fp8: AttentionScales | None = None  # what is multiplied is put into FP8 with these; set by `bind`
        self.clip: float | None = None  # queries, keys and values are cut at plus and minus this
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        self.slopes: Tensor | None = None  # [heads] float32 of ALiBi
        self.temperatures: Tensor | None = None  # [positions] float32: queries are multiplied with that of their place
        self.sinks_part: Part | None = None
        self.sinks: Tensor | None = None  # [heads] float32: one more score for each query, without a value

    def declare(self) -> list[Declared]:
        return [] if self.sinks_part is None else [Declared("sinks", [self.sinks_part], Float32Tensors())]

    @property
    def is_plain(self) -> bool:
        """Nothing but norms, rotation, a window, a softcap and sinks stands between products and scores, or beside."""
        more = (self.clip, self.slopes, self.temperatures, self.heads.attention_chunk, self.in_fp8)
        return all(each is None for each in more)

    @property
    def head_norms(self) -> HeadNorms | None:
        """Those that are computed on the way to the cache: with no mean subtracted, and no sum over ranks."""
        if self.q_norm is None or self.k_norm is None:
            return None
        spec, over_all = self.q_norm.spec, self.q_norm.spec.over is NormOver.ALL_HEADS
        if spec.norm.is_centred or spec.over is NormOver.OWN_HEAD or (over_all and self.q_norm.parallel.world > 1):
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, spec.norm.eps, over_all)

    @property
    def input_form(self) -> InputForm:
        return self.qkv.input_form

    @property
    def kind(self) -> object:
        return self.heads, self.qkv.kind, self.out.kind

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec:
        heads = self.heads
        bounds = [each for each in (heads.window, heads.attention_chunk) if each is not None]
        return CacheSpec(heads.num_kv_heads, heads.head_dim, dtype, min(bounds, default=None))

    @property
    def multiplies_in_fp8(self) -> bool:
        """Whether products have scales, and this device rounds them: of scores that nothing but a window and a softcap
        is done to."""
        more = (self.slopes, self.sinks, self.heads.attention_chunk)
        return self.cache_scales.products is not None and self.ops.fp8_attention and all(each is None for each in more)

    def bind(self, cache_dtype: torch.dtype) -> None:
        """Called with the type of the cache that every pass will use, where `multiplies_in_fp8`."""
        scales = self.cache_scales.of_products(cache_dtype, self.ops.fp8_max)
        self.in_fp8 = None if scales is None else self.ops.pack_attention_scales(scales)

    def forward(
        self, x: Rows, batch: Batch, cos_sin: Tensor, cache: tuple[Tensor, ...], wanted: Tensor | None = None
    ) -> Product:
        k_cache, v_cache = cache
        heads = self.heads
        norms = self.head_norms
        is_changed = self.clip is not None or (self.q_norm is not None and norms is None)
        product, scales = split_scales(self.qkv.forward(x) if is_changed else self.qkv.linear_unscaled(x))
        fused = product.view(x.shape[0], -1, heads.head_dim)
        q, k, v = fused.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        if is_changed:
            q, k, v = self._change(q, k, v)
        kv_scales = self.cache_scales.of(k_cache.dtype, self.ops.fp8_max)
        q = self.ops.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache, kv_scales, scales, norms)
        if self.temperatures is not None:
            q = (q * self.temperatures[batch.positions][:, None, None]).to(q.dtype)
        # No kernel lets tokens see what comes after them.
        attention = self.ops.attention if batch.visible_ends is None else reference.attention
        mixed = attention(
            q, k, v, k_cache, v_cache, batch, heads.scale, heads.window, heads.softcap,
            kv_scales=kv_scales, slopes=self.slopes, sinks=self.sinks, attention_chunk=heads.attention_chunk,
            in_fp8=self.in_fp8,
        )  # fmt: skip
        return self.out.linear_unscaled(mixed if wanted is None else mixed[wanted])

    def _change(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.clip is not None:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        if self.q_norm is None or self.k_norm is None or self.head_norms is not None:
            return q, k, v
        return self.q_norm.forward(q), self.k_norm.forward(k), v
