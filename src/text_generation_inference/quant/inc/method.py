"""Measured FP8: plain matrices that are quantised, when they have been read, with scales from a measurement."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.errors import StartError
from text_generation_inference.kernels.fp8 import FP8, AttentionScales, Fp8Weight
from text_generation_inference.quant.fp8 import Fp8, join
from text_generation_inference.quant.inc.scales import quantize, weight_scale
from text_generation_inference.quant.inc.static import MatrixScales, StaticScales
from text_generation_inference.quant.method import Matrix, Method
from text_generation_inference.quant.quantization import Quantization
from text_generation_inference.weights.checkpoint import Checkpoint, Wanted
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
        if matrix.is_head:
            found = self.scales.find_head()
        return None if found is None else MeasuredFp8(found)

    @property
    def rounds_plain(self) -> bool:
        return True

    @property
    def rounds_head(self) -> bool:
        return self.scales.find_head() is not None

    def attention_scales(self, attention: str, softmax_scale: float) -> AttentionScales | None:
        return self.scales.attention_scales(attention, softmax_scale)

    def cache_scale(self, attention: str, side: str) -> float | None:
        return self.scales.cache_scale(attention, side)


class MeasuredFp8(Fp8):
    def __init__(self, scales: Sequence[MatrixScales]) -> None:
        self.scales = scales  # of each part

    def list_reads(self, parts: Parts, checkpoint: Checkpoint) -> Iterator[Wanted]:
        for name, part in parts:
            yield part.unsliced.wanted(name)

    def make(self, parts: Parts, make: Read, dtype: torch.dtype) -> Any:
        """Scales are those of all of a matrix, so that what a rank has of it are the values of one rank."""
        data: list[Tensor] = []
        rows: list[Tensor] = []
        largest: dict[str, tuple[Tensor, float | None]] = {}  # experts of one tensor have one name
        for (name, part), found in zip(parts, self.scales, strict=True):
            value = make(name, part.unsliced)
            seen = largest[name][0] if name in largest else torch.zeros_like(value.flatten()[0])
            largest[name] = torch.maximum(seen, value.abs().amax()), found.measured_maximum
            scale = weight_scale(value, found.weight, found.generation).expand(value.shape[0])
            kept = part.take_from(quantize(value, scale[:, None], found.generation).view(torch.uint8))
            data.append(part.arrange_rows(kept).contiguous().view(FP8))
            rows.append(part.arrange_rows(part.take_from(scale)))
        for name, (most, measured) in largest.items():
            _check_maximum(name, most, measured)
        input_scale = torch.tensor(max(found.input_scale for found in self.scales), device=data[0].device)
        full_scale = self.scales[0].generation.full_scale
        return Fp8Weight(join(data), torch.cat(rows), input_scale, dtype, full_scale=full_scale)


def _check_maximum(name: str, found: Tensor, measured: float | None) -> None:
    if measured is None:
        return
    largest = found.item()
    if not measured * (1 - _SAME_MAXIMUM) <= largest <= measured * (1 + _SAME_MAXIMUM):  # nor is NaN
        raise StartError(
            f"the measurement belongs to other weights: the largest value of {name} was {measured:.6g}, here it is"
            f" {largest:.6g}. Measure this model."
        )
