"""Scale methods against direct computation, for both generations."""

import math

import pytest
import torch

from text_generation_inference.quant.inc.scales import (
    GAUDI2,
    GAUDI3,
    METHODS,
    CardGeneration,
    Rounding,
    Rule,
    Value,
    activation_scale,
    quantize,
    round_hardware,
    round_pow2,
    scale_of,
    weight_scale,
)

BOTH = pytest.mark.parametrize("generation", [GAUDI2, GAUDI3], ids=lambda g: g.name)
FULL = {"GAUDI2": 240.0, "GAUDI3": 448.0}
HARDWARE = {"GAUDI2": [16.0, 1.0, 1 / 16, 1 / 256], "GAUDI3": [2.0**e for e in range(7, -56, -1)]}
MAXIMA = [1e-30, 3e-6, 0.01, 0.4375, 0.99, 1.0, 7.0, 56.0, 60.0, 111.9, 112.0, 112.1, 448.0, 2365.3, 1e5, 3e9]


def pow2(scale: float) -> float:
    """By trying: the smallest power of two that is not less."""
    return next(2.0**e for e in range(-140, 140) if 2.0**e >= scale)


def hardware(scale: float, generation: CardGeneration) -> float:
    """By looking: the smallest hardware scale that is not less, else the largest."""
    return min((s for s in HARDWARE[generation.name] if s >= scale), default=HARDWARE[generation.name][0])


@BOTH
def test_formats(generation: CardGeneration) -> None:
    assert generation.full_scale == FULL[generation.name]
    assert list(generation.hardware_scales) == HARDWARE[generation.name]


def test_rounding() -> None:
    scales = torch.tensor([2.0**-20, 2.0**-20 * 1.0000002, 0.5, 0.50001, 1.0, 1.0000001, 3.0, 4.0, 4.1])
    assert round_pow2(scales).tolist() == [2.0**-20, 2.0**-19, 0.5, 1.0, 1.0, 2.0, 4.0, 4.0, 8.0]
    for generation in (GAUDI2, GAUDI3):
        found = round_hardware(scales, generation).tolist()
        assert found == [hardware(scale, generation) for scale in scales.tolist()]


# ScaleMethod: (weights: rounding, by channel), rounding of activations. None: a number instead.
TABLE = {
    "unit_scale": (("one", False), "one"),
    "hw_aligned_single_scale": (("first", False), "first"),
    "maxabs_hw": (("hw", False), "hw"),
    "maxabs_pow2": (("pow2", False), "pow2"),
    "maxabs_arbitrary": (("none", False), "none"),
    "maxabs_hw_opt_weight": (("best hw", False), "hw"),
    "maxabs_pow2_opt_weight": (("best pow2", False), "pow2"),
    "act_maxabs_hw_weights_pcs_maxabs_pow2": (("pow2", True), "hw"),
    "act_maxabs_hw_weights_pcs_opt_pow2": (("best pow2", True), "hw"),
    "act_maxabs_pow2_weights_pcs_maxabs_pow2": (("pow2", True), "pow2"),
    "act_maxabs_pow2_weights_pcs_opt_pow2": (("best pow2", True), "pow2"),
}


def by_hand(maximum: float, how: str, backoff: float, generation: CardGeneration) -> float:
    scale = float(torch.tensor(maximum / (FULL[generation.name] * backoff), dtype=torch.float32))
    rounded = {"pow2": pow2, "none": float, "hw": lambda s: hardware(s, generation)}
    fixed = {"one": 1.0, "first": HARDWARE[generation.name][0]}
    return fixed[how] if how in fixed else rounded[how](scale)


def test_the_table_is_complete() -> None:
    assert set(METHODS) == set(TABLE)


@BOTH
@pytest.mark.parametrize("name", TABLE)
def test_activations(name: str, generation: CardGeneration) -> None:
    rule = METHODS[name].activation
    for maximum in MAXIMA:
        expected = by_hand(maximum, TABLE[name][1], 0.25, generation)
        assert activation_scale(maximum, rule, generation) == pytest.approx(expected, rel=1e-6)


def squared_error(rows: torch.Tensor, scale: float, generation: CardGeneration) -> float:
    full = FULL[generation.name]
    stored = (rows / scale).clamp(-full, full).to(torch.float8_e4m3fn).float()
    return (stored.double() * scale - rows.double()).square().sum().item()


@BOTH
@pytest.mark.parametrize("name", TABLE)
def test_weights(name: str, generation: CardGeneration) -> None:
    how, by_channel = TABLE[name][0]
    torch.manual_seed(3)
    weight = torch.randn(1100, 48) * torch.logspace(-4, 2, 1100)[:, None]  # more rows than are looked at at once
    found = weight_scale(weight, METHODS[name].weight, generation)
    assert found.dtype is torch.float32 and found.shape == ((1100,) if by_channel else ())
    for number in range(0, 1100, 137) if by_channel else [0]:
        rows = weight[number : number + 1] if by_channel else weight
        scale = found[number].item() if by_channel else found.item()
        largest = rows.abs().max().item()
        if not how.startswith("best"):
            assert scale == pytest.approx(by_hand(largest, how, 0.5, generation), rel=1e-6)
            continue
        if how == "best hw":
            candidates = HARDWARE[generation.name]
        elif by_channel:
            reference = by_hand(largest, "pow2", 0.5, generation)
            candidates = [reference * 2.0**e for e in range(-3, 5)]
        else:
            candidates = [2.0**e for e in range(-10, 10)]
        assert scale in candidates
        least = min(squared_error(rows, candidate, generation) for candidate in candidates)
        assert squared_error(rows, scale, generation) == pytest.approx(least, rel=1e-9)


def test_opt_is_better_than_maxabs() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256) * 0.2
    best, usual = (
        squared_error(weight, weight_scale(weight, METHODS[name].weight, GAUDI2).item(), GAUDI2)
        for name in ("maxabs_hw_opt_weight", "maxabs_hw")
    )
    assert best < usual


@BOTH
def test_nothing_but_zeros(generation: CardGeneration) -> None:
    for rounding in (Rounding.IDENTITY, Rounding.POW2, Rounding.HARDWARE):
        rule = Rule(Value.MAXABS, rounding, 0.5)
        assert scale_of(torch.zeros(3), rule, generation).tolist() == [1.0] * 3
        assert activation_scale(0.0, rule, generation) == 1.0


@BOTH
def test_stored_values_stay_in_range(generation: CardGeneration) -> None:
    stored = quantize(torch.tensor([1e9, -1e9, 3.0]), torch.tensor(1.0), generation).float()
    assert stored.tolist() == [FULL[generation.name], -FULL[generation.name], 3.0]


@BOTH
def test_the_largest_value_uses_its_share_of_the_range(generation: CardGeneration) -> None:
    for backoff in (0.25, 0.5, 1.0):
        scale = activation_scale(10.0, Rule(Value.MAXABS, Rounding.IDENTITY, backoff), generation)
        assert 10.0 / scale == pytest.approx(FULL[generation.name] * backoff, rel=1e-6)
        rounded = activation_scale(10.0, Rule(Value.MAXABS, Rounding.POW2, backoff), generation)
        assert math.log2(rounded).is_integer() and scale <= rounded < 2 * scale
