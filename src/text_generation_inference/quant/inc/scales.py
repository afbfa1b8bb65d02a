"""Scales of matrices and activations in FP8 from their largest values: the methods of Gaudi's toolkits.

Pure functions of tensors; knows neither models nor files. A scale is maxabs / (full scale x backoff), then
rounded; a stored value is the value divided by its scale, clamped to the full scale.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from text_generation_inference.kernels.fp8 import FP8

_ROWS_AT_A_TIME = 1024
_OPT_POW2 = tuple(2.0**exponent for exponent in range(-10, 10))
_OPT_BESIDE = tuple(2.0**exponent for exponent in range(-3, 5))  # times the scale that the largest value gives


@dataclass(frozen=True, slots=True)
class CardGeneration:
    """What a generation of Gaudi computes with."""

    name: str
    full_scale: float  # of e4m3
    exponents: range  # hardware scales are 2 to these, the largest first

    @property
    def hardware_scales(self) -> tuple[float, ...]:
        return tuple(2.0**exponent for exponent in self.exponents)


GAUDI2 = CardGeneration("GAUDI2", 240.0, range(4, -9, -4))
GAUDI3 = CardGeneration("GAUDI3", 448.0, range(7, -56, -1))
GENERATIONS = {generation.name: generation for generation in (GAUDI2, GAUDI3)}


def generation_of(full_scale: float) -> CardGeneration:
    """Of a device whose FP8 ends there."""
    return GAUDI2 if full_scale == GAUDI2.full_scale else GAUDI3


class Value(StrEnum):
    """Where a scale comes from."""

    MAXABS = "MAXABS"
    FIXED = "FIXED_VALUE"
    OPT = "OPT"  # of several scales that with the least squared error


class Rounding(StrEnum):
    IDENTITY = "IDENTITY"
    POW2 = "POW2"
    HARDWARE = "HW_ALIGNED"
    FIRST_HARDWARE = "HW_ALIGNED_FIXED"
    UNIT = "SCALE_UNIT"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of tensor gets its scales."""

    value: Value
    rounding: Rounding
    backoff: float  # share of the full scale that the largest value takes
    by_channel: bool = False  # a scale per output row of a matrix


@dataclass(frozen=True, slots=True)
class ScaleMethod:
    weight: Rule
    activation: Rule

    @property
    def needs_statistics(self) -> bool:
        return self.activation.value is not Value.FIXED


def _method(value: Value, rounding: Rounding) -> ScaleMethod:
    if value is Value.FIXED:
        return ScaleMethod(Rule(value, rounding, 1.0), Rule(value, rounding, 1.0))
    return ScaleMethod(Rule(value, rounding, 0.5), Rule(value, rounding, 0.25))


def _with_weights(method: ScaleMethod, value: Value, rounding: Rounding, by_channel: bool) -> ScaleMethod:
    return replace(method, weight=Rule(value, rounding, 0.5, by_channel))


_HW, _POW2 = _method(Value.MAXABS, Rounding.HARDWARE), _method(Value.MAXABS, Rounding.POW2)
METHODS = {
    "unit_scale": _method(Value.FIXED, Rounding.UNIT),
    "hw_aligned_single_scale": _method(Value.FIXED, Rounding.FIRST_HARDWARE),
    "maxabs_hw": _HW,
    "maxabs_pow2": _POW2,
    "maxabs_arbitrary": _method(Value.MAXABS, Rounding.IDENTITY),
    "maxabs_hw_opt_weight": _with_weights(_HW, Value.OPT, Rounding.HARDWARE, by_channel=False),
    "maxabs_pow2_opt_weight": _with_weights(_POW2, Value.OPT, Rounding.POW2, by_channel=False),
    "act_maxabs_hw_weights_pcs_maxabs_pow2": _with_weights(_HW, Value.MAXABS, Rounding.POW2, by_channel=True),
    "act_maxabs_hw_weights_pcs_opt_pow2": _with_weights(_HW, Value.OPT, Rounding.POW2, by_channel=True),
    "act_maxabs_pow2_weights_pcs_maxabs_pow2": _with_weights(_POW2, Value.MAXABS, Rounding.POW2, by_channel=True),
    "act_maxabs_pow2_weights_pcs_opt_pow2": _with_weights(_POW2, Value.OPT, Rounding.POW2, by_channel=True),
}
DEFAULT_METHOD = "maxabs_hw"


def activation_scale(maximum: float, rule: Rule, generation: CardGeneration) -> float:
    """The scale of a tensor whose largest value is known."""
    return scale_of(torch.tensor(maximum, dtype=torch.float32), rule, generation).item()


def weight_scale(weight: Tensor, rule: Rule, generation: CardGeneration) -> Tensor:
    """The scale of a matrix `[out, in]`: `[]`, or `[out]` where each row has its own. float32."""
    # Powers of two are exact on the CPU, which not every device promises.
    largest = torch.cat([rows.abs().amax(1) for rows in _split(weight)]).float().cpu()
    scale = scale_of(largest if rule.by_channel else largest.amax(), rule, generation)
    if rule.value is not Value.OPT:
        return scale.to(weight.device)
    if rule.rounding is Rounding.HARDWARE:
        candidates = torch.tensor(generation.hardware_scales)
    elif rule.by_channel:
        candidates = scale[None, :] * torch.tensor(_OPT_BESIDE)[:, None]
    else:
        candidates = torch.tensor(_OPT_POW2)
    return _choose_best(weight, candidates.to(weight.device), rule.by_channel, generation)


def scale_of(maxabs: Tensor, rule: Rule, generation: CardGeneration) -> Tensor:
    """maxabs of any shape -> scales. What holds nothing but zeros gets 1."""
    if rule.rounding is Rounding.UNIT:
        return torch.ones_like(maxabs)
    if rule.rounding is Rounding.FIRST_HARDWARE:
        return torch.full_like(maxabs, generation.hardware_scales[0])
    scale = torch.where(maxabs > 0, maxabs / (generation.full_scale * rule.backoff), 1.0)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    if rule.rounding is Rounding.POW2:
        return round_pow2(scale)
    if rule.rounding is Rounding.HARDWARE:
        return round_hardware(scale, generation)
    return scale


def round_pow2(scale: Tensor) -> Tensor:
    """Up to a power of two."""
    return torch.ldexp(torch.ones_like(scale), _exponent(scale))


def round_hardware(scale: Tensor, generation: CardGeneration) -> Tensor:
    """Up to a scale that the hardware multiplies with for nothing; the nearest one beyond its range."""
    step = abs(generation.exponents.step)
    exponent = step * torch.ceil(_exponent(scale) / step)
    exponent = exponent.clamp(generation.exponents[-1], generation.exponents[0])
    return torch.ldexp(torch.ones_like(scale), exponent)


def _exponent(scale: Tensor) -> Tensor:
    """Of the smallest power of two that is not less. Exact, which a logarithm is not."""
    mantissa, exponent = torch.frexp(scale)
    return (exponent - (mantissa == 0.5).to(exponent.dtype)).float()


def quantize(x: Tensor, scale: Tensor, generation: CardGeneration) -> Tensor:
    """x in FP8; scale broadcasts to it."""
    limit = generation.full_scale
    return (x.float() / scale).clamp(-limit, limit).to(FP8)


def _choose_best(weight: Tensor, candidates: Tensor, by_channel: bool, generation: CardGeneration) -> Tensor:
    """candidates `[n]`, or `[n, out]` -> those with the least squared error, `[]` or `[out]`."""
    each = candidates if candidates.ndim == 2 else candidates[:, None].expand(-1, weight.shape[0])
    errors: list[Tensor] = []
    first = 0
    for rows in _split(weight):
        wide = rows.float()
        scales = each[:, first : first + wide.shape[0]]
        first += wide.shape[0]
        found = [
            (quantize(wide, scale[:, None], generation).float() * scale[:, None] - wide).double().square().sum(1)
            for scale in scales
        ]
        errors.append(torch.stack(found))
    by_row = torch.cat(errors, dim=1)
    if by_channel:
        return each.gather(0, by_row.argmin(0)[None])[0].contiguous()
    return candidates[by_row.sum(1).argmin()]


def _split(weight: Tensor) -> tuple[Tensor, ...]:
    """A few rows at a time, as they are widened."""
    return weight.split(_ROWS_AT_A_TIME)
