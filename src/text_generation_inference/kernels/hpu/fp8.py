"""Products in FP8 on Gaudi.

The card's e4m3 ends at 240 (Gaudi 2) or 448 (Gaudi 3). On Gaudi 2 a cast beyond 240 clips or gives no number, and so
does widening bits that mean more. So weights are quantised, widened and fitted on the host there, and what is cast on
the card is brought into range first. Weights have a scale per output row; those with a scale per square are brought to
that form when they are loaded.

Scales that are known when a model is loaded are constants to the card's compiler, which then chooses the products that
take them at no cost: numbers where an op takes numbers, else tensors that are marked before any graph is captured.
"""

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.fp8 import FP8, AttentionScales, Fp8Rows, Fp8Weight
from text_generation_inference.kernels.hpu.bridge import Bridge
from text_generation_inference.kernels.matrices import Rows, Weight

_SMALLEST = 1e-8  # of a row of zeros
_ROWS_AT_A_TIME = 1024


@dataclass(slots=True)
class StaticFp8Weight(Fp8Weight):
    """With the scale of its inputs as a number, too."""

    known_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class CardAttentionScales(AttentionScales):
    """With those that the fused op takes, which are tensors to it."""

    query_there: Tensor
    key_there: Tensor
    value_there: Tensor
    weight_there: Tensor
    weight_inverse: Tensor


class Fp8Ops:
    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._constants = nn.Module()
        self._num_marked = self._num_constants = 0
        self._full_scale = bridge.fp8_max
        self._device = bridge.device
        self._ops: Any = torch.ops.hpu

    def pack_fp8(self, weight: Fp8Weight) -> Fp8Weight:
        """The weight in the form and range that the card multiplies, and there. Called once after loading, wherever
        that has left it."""
        input_scale = weight.input_scale
        if input_scale is not None and weight.full_scale > self._full_scale:
            input_scale = input_scale * (weight.full_scale / self._full_scale)
        on_host = weight.data.cpu()
        # A rank's part of a matrix may be within the card's range where all of it is not.
        if not weight.by_square and float(on_host.float().abs().max()) <= self._full_scale:
            return self._send(replace(weight, input_scale=input_scale))
        data = torch.empty_like(on_host)
        scales: list[Tensor] = []
        rows = weight.shape[0]
        for first in range(0, rows, _ROWS_AT_A_TIME):  # a few at a time, as they are widened
            part = slice(first, min(first + _ROWS_AT_A_TIME, rows))
            wide = on_host[part].float() * _spread(weight, part).cpu()
            scale = (wide.abs().amax(-1) / self._full_scale).clamp(min=_SMALLEST)
            data[part] = (wide / scale[:, None]).clamp(-self._full_scale, self._full_scale).to(FP8)
            scales.append(scale)
        return self._send(Fp8Weight(data, torch.cat(scales), input_scale, weight.dtype, weight.input_bound))

    def _send(self, weight: Fp8Weight) -> Fp8Weight:
        data, scale = weight.data.to(self._device), self._constant(weight.scale)
        if weight.input_scale is None:
            return Fp8Weight(data, scale, None, weight.dtype, weight.input_bound)
        known = float(weight.input_scale)
        about = (self._constant(weight.input_scale), weight.dtype, weight.input_bound)
        return StaticFp8Weight(data, scale, *about, known_scale=known)

    def pack_attention_scales(self, scales: AttentionScales) -> AttentionScales:
        numbers = (scales.query, scales.key, scales.value, scales.weight, 1 / scales.weight)
        there = (self._constant(torch.tensor([number])) for number in numbers)
        return CardAttentionScales(*astuple(scales), *there)

    def _constant(self, scale: Tensor) -> Tensor:
        """On the card, under a name by which the software knows what it is."""
        there = nn.Parameter(scale.to(self._device), requires_grad=False)
        self._constants.register_parameter(f"scale_{self._num_constants}", there)
        self._num_constants += 1
        return there

    def mark_constants(self) -> None:
        """Before a graph is captured: scales that have come since are constants of it. Lazy mode has such marks."""
        if not self._bridge.lazy or self._num_marked == self._num_constants:
            return
        core = self._bridge.core
        initialize = getattr(core, "hpu_inference_initialize", None) or core.hpu_initialize
        initialize(self._constants, mark_only_scales_as_const=True)
        self._num_marked = self._num_constants

    def quantize_rows(self, x: Tensor, quantize_for: Fp8Weight) -> Fp8Rows:
        """x `[tokens, in]`, with the one scale that was measured for this weight's inputs, else one per row."""
        if isinstance(quantize_for, StaticFp8Weight):
            assert quantize_for.input_scale is not None
            bound = quantize_for.known_scale * self._full_scale  # inputs may be larger than those that were measured
            return Fp8Rows(self._cast(x.clamp(-bound, bound), 1 / quantize_for.known_scale), quantize_for.input_scale)
        if quantize_for.input_scale is not None:
            scale = quantize_for.input_scale
            bound = scale * self._full_scale
            x = torch.minimum(torch.maximum(x.float(), -bound), bound).to(x.dtype)
        else:
            scale = (x.float().abs().amax(-1, keepdim=True) + _SMALLEST) / self._full_scale
        return Fp8Rows(self._cast(x, scale.reciprocal()), scale)

    def _cast(self, x: Tensor, factor: Tensor | float) -> Tensor:
        return self._ops.cast_to_fp8_v2(x, factor, False, False, FP8)[0]

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if not isinstance(weight, Fp8Weight):
            return reference.linear(x, weight, bias)
        if isinstance(x, Tensor):
            dtype = dtype or x.dtype
            x = self.quantize_rows(x, weight)
        out_dtype = dtype or weight.dtype
        return self._ops.fp8_gemm_v2(
            x.data, False, weight.data, True, None, out_dtype, x.scale, weight.scale, bias, False
        )

    def multiply(
        self, x: Tensor, y: Tensor, transposed: bool, scales: tuple[float, float], dtype: torch.dtype
    ) -> Tensor:
        """x `[..., n, k]` times y, `[..., k, m]` or transposed, both in FP8 -> `[..., n, m]`"""
        return self._ops.fp8_gemm_v2(x, False, y, transposed, None, dtype, *scales, None, False)

    def to_cache(self, values: Tensor, scale: float) -> Tensor:
        """What a cache in FP8 holds of values, or a product in FP8 takes."""
        bound = scale * self._full_scale
        return self._cast(values.clamp(-bound, bound), 1 / scale)

    def from_cache(self, stored: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return self._ops.cast_from_fp8(stored, scale, dtype)


def _spread(weight: Fp8Weight, rows: slice) -> Tensor:
    return fp8.spread(weight.scale, *weight.shape).expand(weight.shape[0], -1)[rows]
