"""Self-attention over the paged cache."""

from dataclasses import dataclass

from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.fp8 import FP8, Fp8Rows, ScaledRows
from text_generation_inference.layers.linear import Linear
from text_generation_inference.weights.declare import Module, Number


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """This rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(Module):
    def __init__(self, ops: Ops, name: str, qkv: Linear, out: Linear, heads: HeadLayout) -> None:
        self.ops = ops
        self.name = name
        self.qkv = qkv
        self.out = out
        self.heads = heads
        self.k_scale = 1.0  # of a cache in FP8
        self.v_scale = 1.0

    def declare_numbers(self) -> list[Number]:
        name = self.name
        return [
            Number(f"{side}_scale", tuple(f"{name}.{place}" for place in places))
            for side, places in {
                "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
                "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
            }.items()
        ]

    def kv_scales(self, k_cache: Tensor) -> tuple[float, float]:
        return (self.k_scale, self.v_scale) if k_cache.dtype is FP8 else (1.0, 1.0)

    def forward(
        self,
        x: Tensor | Fp8Rows,
        batch: Batch,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        wanted: Tensor | None = None,
    ) -> Tensor | ScaledRows:
        """x `[tokens, hidden]` -> `[tokens, hidden]` of all tokens, or of those `wanted`; writes keys and values."""
        heads = self.heads
        product = self.qkv.linear_unscaled(x)
        scaled = {} if isinstance(product, Tensor) else {"scales": (product.rows, product.columns)}
        fused = (product if isinstance(product, Tensor) else product.data).view(x.shape[0], -1, heads.head_dim)
        q, k, v = fused.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        kv_scales = self.kv_scales(k_cache)
        q = self.ops.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache, kv_scales=kv_scales, **scaled)
        mixed = self.ops.attention(
            q, k, v, k_cache, v_cache, batch, heads.scale, heads.window, heads.softcap, kv_scales=kv_scales
        )
        return self.out.linear_unscaled(mixed if wanted is None else mixed[wanted])
