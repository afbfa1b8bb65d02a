"""Self-attention over latents (MLA): what is kept of a token is one row for all heads.

`kernels.latent` says what the letters are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.errors import StartError
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fp8 import FP8
from text_generation_inference.kernels.fused_decode import FusedLatents
from text_generation_inference.kernels.matrices import Product, Rows, plain
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.attention import SelfAttention
from text_generation_inference.layers.cache import LatentCacheSpec
from text_generation_inference.layers.linear import Linear
from text_generation_inference.layers.norm import RMSNorm
from text_generation_inference.quant.method import InputForm, Matrix


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """This rank's heads."""

    num_heads: int
    plain_dim: int  # p
    rope_dim: int  # r
    value_dim: int  # v
    latent_dim: int  # c
    scale: float


class LatentAttention(SelfAttention):
    def __init__(
        self,
        ops: Ops,
        name: str,
        heads: LatentHeads,
        *,
        down: Linear,  # queries, or the latent they are made of; then the latent of keys and values, and the shared key
        q_norm: RMSNorm | None,
        q_up: Linear | None,
        kv_norm: RMSNorm,
        kv_up: Matrix,  # [heads * (p + v), c], as it is: the op multiplies parts of it
        out: Linear,
    ) -> None:
        self.ops = ops
        self.name = name
        self.heads = heads
        self.down = down
        self.q_norm = q_norm
        self.q_up = q_up
        self.kv_norm = kv_norm
        self.kv_up = kv_up
        self.out = out

    @property
    def input_form(self) -> InputForm:
        return self.down.input_form

    @property
    def kind(self) -> object:
        return self.heads, self.down.kind, self.q_up and self.q_up.kind, self.out.kind

    @property
    def _up(self) -> Tensor:
        return plain(self.kv_up.weight).view(self.heads.num_heads, -1, self.heads.latent_dim)

    def as_fused(self) -> FusedLatents:
        """For a pass that fuses all layers."""
        norm, query_norm, query_up = self.kv_norm, self.q_norm, self.q_up
        if query_norm is None or query_up is None:
            return FusedLatents(self._up, (norm.weight, norm.eps))
        return FusedLatents(self._up, (norm.weight, norm.eps), query_up.weight, (query_norm.weight, query_norm.eps))

    def cache_spec(self, dtype: torch.dtype) -> LatentCacheSpec:
        if dtype is FP8:
            raise StartError(
                "`kv_cache_dtype` fp8_e4m3fn is for keys and values: this model keeps latents. Leave it out."
            )
        return LatentCacheSpec(self.heads.latent_dim, self.heads.rope_dim, dtype)

    def forward(
        self, x: Rows, batch: Batch, cos_sin: Tensor, cache: tuple[Tensor, ...], wanted: Tensor | None = None
    ) -> Product:
        heads, (latents,) = self.heads, cache
        down = self.down.forward(x)
        width = heads.latent_dim + heads.rope_dim
        queries, latent = down[:, :-width], down[:, -width:]
        if self.q_norm is not None and self.q_up is not None:
            queries = self.q_up.forward(self.q_norm.forward(queries, self.q_up.input_form))
        q = queries.view(x.shape[0], heads.num_heads, heads.plain_dim + heads.rope_dim)
        norm = (self.kv_norm.weight, self.kv_norm.eps)
        mixed = self.ops.latent_attention(q, latent, self._up, norm, cos_sin, batch, latents, heads.scale)
        return self.out.linear_unscaled(mixed if wanted is None else mixed[wanted])
