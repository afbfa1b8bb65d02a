"""Self-attention over the paged cache.

Level 4.
"""

from dataclasses import dataclass

from torch import Tensor

from tgi.devices.device import Ops
from tgi.kernels.batch import ForwardBatch
from tgi.layers.linear import Linear
from tgi.weights.declare import Module


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

    def forward(self, x: Tensor, batch: ForwardBatch, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """x `[tokens, hidden]` -> `[tokens, hidden]`; writes this step's keys and values."""
        heads = self.heads
        fused = self.qkv.forward(x).view(x.shape[0], -1, heads.head_dim)
        q, k, v = fused.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
        q = self.ops.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache)
        mixed = self.ops.attention(q, k_cache, v_cache, batch, heads.scale, heads.window, heads.softcap)
        return self.out.forward(mixed)
