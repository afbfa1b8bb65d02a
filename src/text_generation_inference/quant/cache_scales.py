"""The scales of a KV cache in FP8: one for all keys and one for all values of a layer.

From the checkpoint, from a measurement, or 1. A part of an attention, below which its names are. Beside them those of
the products of attention, where they were measured.
"""

from dataclasses import replace

import torch

from text_generation_inference.kernels.fp8 import FP8, FP8_MAX, AttentionScales
from text_generation_inference.weights.declare import Module, Number

# Where checkpoints have them; the first that is there counts.
_NAMES = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}


class CacheScales(Module):
    def __init__(self, softmax_scale: float = 1.0) -> None:
        self.softmax_scale = softmax_scale  # of the attention
        self.k = 1.0
        self.v = 1.0
        self.products: AttentionScales | None = None  # attention multiplies in FP8 where a device does that
        self.needed = False  # the checkpoint must have them
        self._known: set[str] = set()

    def set_measured(self, side: str, scale: float) -> None:
        """`side` is k or v. What a checkpoint says is not read then."""
        setattr(self, side, scale)
        self._known.add(side)

    def declare_numbers(self) -> list[Number]:
        return [Number(side, names, self.needed, side in self._known) for side, names in _NAMES.items()]

    def of(self, cache_dtype: torch.dtype, fp8_max: float = FP8_MAX) -> tuple[float, float]:
        """Those that a cache of this type is written and read with, on a device whose FP8 end at `fp8_max`."""
        return (self._fit("k", fp8_max), self._fit("v", fp8_max)) if cache_dtype is FP8 else (1.0, 1.0)

    def of_products(self, cache_dtype: torch.dtype, fp8_max: float = FP8_MAX) -> AttentionScales | None:
        """Keys and values are multiplied as a cache in FP8 has them."""
        if self.products is None or cache_dtype is not FP8:
            return self.products
        key, value = self.of(cache_dtype, fp8_max)
        return replace(self.products, key=key, value=value)

    def _fit(self, side: str, fp8_max: float) -> float:
        """Checkpoints are made for 448, measurements for the device; 1 was found by nobody."""
        scale: float = getattr(self, side)
        return scale if side in self._known or scale == 1 else scale * (FP8_MAX / fp8_max)
