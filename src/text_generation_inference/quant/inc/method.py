"""Measured FP8: plain matrices that are quantised, when they have been read, with scales from a measurement."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import StartError
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.quant.fp8 import Fp8, join
from text_generation_inference.quant.inc.scales import quantize, weight_scale
from text_generation_inference.quant.inc.static import MatrixScales, StaticScales
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.declare import Parts, Read

_SAME_MAXIMUM = 0.02  # largest values of the same weights differ by less, whatever type they were measured in


class MeasuredQuantization(Quantization):
    """A plain checkpoint with what QUANT_CONFIG makes of it."""

    method = "static"
    origin = "`quant_config`"
    needs_fp8 = True

    def __init__(self, scales: StaticScales) -> None:
        self.scales = scales

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        found = self.scales.find(names) if matrix.may_round else None
        return None if found is None else MeasuredFp8(found)

    def cache_scale(self, attention: str, side: str) -> float | None:
        return self.scales.cache_scale(attention, side)


class MeasuredFp8(Fp8):
    def __init__(self, scales: Sequence[MatrixScales]) -> None:
        self.scales = scales  # of each part

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        data: list[Tensor] = []
        rows: list[Tensor] = []
        for (name, part), found in zip(parts, self.scales, strict=True):
            value = make(name, part)
            _check_maximum(name, value, found.measured_maximum, is_whole=part.dim is None)
            scale = weight_scale(value, found.weight, found.generation).expand(value.shape[0])
            data.append(quantize(value, scale[:, None], found.generation))
            rows.append(scale)
        input_scale = torch.tensor(max(found.input_scale for found in self.scales), device=data[0].device)
        return Fp8Weight(join(data), torch.cat(rows), input_scale, dtype)


def _check_maximum(name: str, value: Tensor, measured: float | None, is_whole: bool) -> None:
    """A slice of a matrix may have a smaller one than was measured of all of it."""
    if measured is None:
        return
    largest = value.abs().amax().item()
    smallest = measured * (1 - _SAME_MAXIMUM) if is_whole else 0.0
    if not smallest <= largest <= measured * (1 + _SAME_MAXIMUM):  # nor is NaN
        raise StartError(
            f"the measurement belongs to other weights: the largest value of {name} was {measured:.6g}, here it is"
            f" {largest:.6g}. Measure this model."
        )
