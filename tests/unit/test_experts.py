"""Routing rules and the op `experts` against plain statements of their formulas, token by token."""

import math

import pytest
import torch
from torch import Tensor

from text_generation_inference.kernels import fp8
from text_generation_inference.kernels.experts import GATES, experts
from text_generation_inference.kernels.routing import (
    InputRouting,
    Routing,
    SigmoidRouting,
    SoftmaxRouting,
    SparseMixerRouting,
    route,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def best(values: list[float], count: int) -> list[int]:
    """Of equal ones the first."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def softmax_rule(rule: SoftmaxRouting, scores: list[float], _: list[float]) -> dict[int, float]:
    shares = softmax(scores)
    size = len(scores) // rule.num_groups
    groups = best([max(shares[g * size : g * size + size]) for g in range(rule.num_groups)], rule.top_groups)
    chosen = best([share if place // size in groups else 0.0 for place, share in enumerate(shares)], rule.top_k)
    weights = [shares[place] if place // size in groups else 0.0 for place in chosen]
    if rule.p_norm is not None:
        norm = sum(weight**rule.p_norm for weight in weights) ** (1 / rule.p_norm)
        weights = [weight / norm for weight in weights]
    return {place: weight * rule.factor for place, weight in zip(chosen, weights, strict=True)}


def sigmoid_rule(rule: SigmoidRouting, scores: list[float], correction: list[float]) -> dict[int, float]:
    shares = [1 / (1 + math.exp(-score)) for score in scores]
    total = [share + more for share, more in zip(shares, correction, strict=True)]
    size = len(scores) // rule.num_groups
    sums = [sum(sorted(total[g * size : g * size + size])[-2:]) for g in range(rule.num_groups)]
    groups = best(sums, rule.top_groups)
    chosen = best([value if place // size in groups else -math.inf for place, value in enumerate(total)], rule.top_k)
    whole = sum(shares[place] for place in chosen) if rule.normalized else 1.0
    return {place: shares[place] / whole * rule.factor for place in chosen}


def sparse_mixer_rule(rule: SparseMixerRouting, scores: list[float], _: list[float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for _ in range(rule.top_k):
        left = [place for place in range(len(scores)) if place not in found]
        first = max(left, key=lambda place: scores[place])
        most = scores[first]
        near = [p for p in left if (most - scores[p]) / max(abs(scores[p]), most) <= 2 * rule.jitter]
        found[first] = math.exp(most) / sum(math.exp(scores[place]) for place in near)
    return found


RULES = [
    (SoftmaxRouting(2, p_norm=1), softmax_rule),
    (SoftmaxRouting(3), softmax_rule),
    (SoftmaxRouting(4, p_norm=2.0), softmax_rule),
    (SoftmaxRouting(3, factor=16.0, num_groups=4, top_groups=2), softmax_rule),
    (SoftmaxRouting(6, num_groups=4, top_groups=1), softmax_rule),  # more than the group has: others weigh nothing
    (SigmoidRouting(3, factor=2.5, num_groups=4, top_groups=2), sigmoid_rule),
    (SigmoidRouting(2, normalized=False), sigmoid_rule),
    (SparseMixerRouting(0.01), sparse_mixer_rule),
    (SparseMixerRouting(0.3), sparse_mixer_rule),
]


@pytest.mark.parametrize(("rule", "formula"), RULES)
def test_rules(rule: Routing, formula: object) -> None:
    scores, correction = torch.randn(40, 12) * 2, torch.randn(12) * 0.3
    scores[7] = 0.25  # all equal
    scores[8, 3:9] = 5.0
    ids, weights = route(scores, rule, correction if isinstance(rule, SigmoidRouting) else None)
    assert ids.shape == weights.shape == (40, rule.top_k) and weights.dtype is torch.float32
    for token in range(40):
        more = correction.tolist() if isinstance(rule, SigmoidRouting) else [0.0] * 12
        expected = formula(rule, scores[token].tolist(), more)  # pyright: ignore
        assert ids[token].tolist() == list(expected)
        assert weights[token].tolist() == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-7)


def test_softmax_over_the_chosen() -> None:
    """Which is what dividing by their sum comes to."""
    scores = torch.randn(9, 16)
    ids, weights = SoftmaxRouting(4, p_norm=1)(scores)
    torch.testing.assert_close(weights, scores.gather(1, ids).softmax(-1))


def test_sigmoid_of_the_best() -> None:
    ids, weights = InputRouting()(torch.tensor([[0.5, -1.0, 0.5], [-3.0, -2.0, -4.0]]))
    assert ids.tolist() == [[0], [1]]
    torch.testing.assert_close(weights, torch.tensor([[0.5], [-2.0]]).sigmoid())


# -- the op ----------------------------------------------------------------------------------------------------------


def one_by_one(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate: str = "silu") -> Tensor:
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            product = GATES[gate](*(gate_up[expert] @ x[token]).chunk(2))
            out[token] += weight * (down[expert] @ product)
    return out


def make(tokens: int, count: int, top_k: int, hidden: int, width: int) -> tuple[Tensor, ...]:
    weights, ids = torch.randn(tokens, count).softmax(-1).topk(top_k)
    return (
        torch.randn(tokens, hidden), ids, weights,
        torch.randn(count, 2 * width, hidden) / hidden**0.5, torch.randn(count, hidden, width) / width**0.5,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(6, 8, 2, 32, 24), (1, 8, 8, 32, 24), (7, 3, 2, 18, 10), (0, 4, 1, 16, 8)])
@pytest.mark.parametrize("gate", GATES)
def test_experts(sizes: tuple[int, ...], gate: str) -> None:
    x, ids, weights, gate_up, down = make(*sizes)
    found = experts(x, ids, weights, gate_up.flatten(0, 1), down.flatten(0, 1), gate)
    torch.testing.assert_close(found, one_by_one(x, ids, weights, gate_up, down, gate), rtol=1e-4, atol=1e-5)


def test_biases_and_scaled_inputs() -> None:
    x, ids, weights, gate_up, down = make(5, 4, 1, 16, 8)
    biases = torch.randn(4, 16), torch.randn(4, 16)
    found = experts(x, ids, weights, gate_up.flatten(0, 1), down.flatten(0, 1), biases=biases, scale_inputs=True)
    for token in range(5):
        expert = ids[token, 0]
        product = gate_up[expert] @ (x[token] * weights[token, 0]) + biases[0][expert]
        expected = down[expert] @ GATES["silu"](*product.chunk(2)) + biases[1][expert]
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_square", [False, True])
def test_fp8(by_square: bool) -> None:
    """What each expert's matrices in FP8 give by themselves."""
    x, ids, weights, gate_up, down = make(5, 3, 2, 256, 128)
    first, second = (fp8.quantize_weight(part.flatten(0, 1), by_square) for part in (gate_up, down))
    expected = torch.zeros_like(x)
    for token in range(5):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            each = [fp8.quantize_weight(part[expert], by_square) for part in (gate_up, down)]
            product = fp8.linear(fp8.quantize_rows(x[token, None], each[0]), each[0], None, torch.float32)
            product = GATES["silu"](*product.chunk(2, -1))
            product = fp8.linear(fp8.quantize_rows(product, each[1]), each[1], None, torch.float32)
            expected[token] += weight * product[0]
    found = experts(x, ids, weights, first, second)
    assert float((found - expected).norm() / expected.norm()) < 1e-3  # a value may be rounded the other way
