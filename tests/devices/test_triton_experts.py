"""Mixtures of experts against their definition in plain torch: on the GPU, or through Triton's interpreter."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from text_generation_inference.kernels import experts as reference
from text_generation_inference.kernels import fp8
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.routing import InputRouting, Routing, SigmoidRouting, SoftmaxRouting

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.triton import experts
from text_generation_inference.kernels.triton.expert_tiles import FORMS as WEIGHT_FORMS
from text_generation_inference.kernels.triton.expert_tiles import (
    TILES,
    Tiling,
    choose_tiles,
    choose_tiling,
    find_form,
)
from text_generation_inference.kernels.triton.experts import TritonExperts, count_blocks
from text_generation_inference.kernels.triton.routing import route

OP = TritonExperts((9, 0))
FORMS = pytest.mark.parametrize("form", ["pairs", "sorted"])


def compute(form: str, *args: Any) -> Tensor:
    """In one of the ways in which kernels do."""
    return OP(*args, by_pair=form == "pairs")


@pytest.fixture(scope="module")
def device(device_name: str) -> torch.device:
    return torch.device(device_name)


@pytest.fixture(autouse=True)
def _seed(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if device_name == "cpu":  # the interpreter cuts bits off where GPUs round; the kernel has a test of its own
        monkeypatch.setattr(experts, "quantize_rows", fp8.quantize_rows)
        monkeypatch.setattr(experts, "choose_shape", lambda k: (32, 64, 1))  # fewer programs, which it is slow at
        monkeypatch.setattr(experts, "_MAX_DOWN", 32)


def close(actual: Tensor, expected: Tensor, tolerance: float = 3e-3) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert float((actual.float() - expected.float()).norm() / expected.float().norm()) < tolerance


def make(
    device: torch.device, tokens: int, count: int, top_k: int, hidden: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    weights, ids = torch.randn(tokens, count, device=device).softmax(-1).topk(top_k)
    x, gate_up, down = (
        torch.randn(tokens, hidden + 8, device=device)[:, :hidden],
        torch.randn(count * 2 * width, hidden, device=device) / hidden**0.5,
        torch.randn(count * hidden, width, device=device) / width**0.5,
    )
    return (x.to(dtype), ids.int(), weights, gate_up.to(dtype), down.to(dtype))


# tokens, experts, chosen, hidden, width: whole tiles and not, experts without tokens, one token
SIZES = [(1, 8, 2, 64, 48), (3, 6, 2, 72, 40), (9, 5, 3, 136, 24), (20, 3, 1, 128, 64)]


@FORMS
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(sizes, (torch.float16, torch.float32)[number % 2]) for number, sizes in enumerate(SIZES)],
    ids=str,
)
def test_experts(device: torch.device, sizes: tuple[int, ...], dtype: torch.dtype, form: str) -> None:
    made = make(device, *sizes, dtype)
    close(compute(form, *made), reference.experts(*made))


@FORMS
@pytest.mark.parametrize("gate", list(reference.GATES))
def test_gates_biases_and_scaled_inputs(device: torch.device, gate: str, form: str) -> None:
    made = make(device, 4, 5, 2, 64, 32, torch.float16)
    biases = torch.randn(5, 64, device=device).half(), torch.randn(5, 64, device=device).half()
    for scale_inputs in (False, True):
        found = compute(form, *made, gate, biases, scale_inputs)
        close(found, reference.experts(*made, gate, biases, scale_inputs))


TILINGS = [
    choose_tiling(pairs, 4, True, "16 bits", roomy=roomy) for pairs in (8, 64, 128, 999) for roomy in (True, False)
]


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("tiling", sorted({replace(each, bk=64) for each in TILINGS}, key=str), ids=str)
def test_tilings(device: torch.device, tiling: Tiling, bulk: bool) -> None:
    if bulk and device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no copy engine for tiles")
    tiling = replace(tiling, bulk=bulk)
    made = make(device, 30, 3, 2, 96, 48, torch.float16)
    second = replace(tiling, bn=2 * tiling.bn, group=2)
    close(OP(*made, by_pair=False, tilings=(tiling, second)), reference.experts(*made))


@FORMS
@pytest.mark.parametrize("scales", ["by row", "static", "by square"])
def test_fp8(device: torch.device, scales: str, form: str) -> None:
    x, ids, weights, gate_up, down = make(device, 2, 3, 2, 256, 128, torch.float16)
    first, second = (fp8.quantize_weight(part, scales == "by square") for part in (gate_up, down))
    if scales == "static":
        first.input_scale, second.input_scale = torch.tensor(0.01, device=device), torch.tensor(0.005, device=device)
    found = compute(form, x, ids, weights, first, second)
    # Values on the edge between two of FP8 may be rounded the other way.
    close(found, reference.experts(x, ids, weights, first, second), 1e-2)
    close(compute(form, x, ids, weights, first, down), reference.experts(x, ids, weights, first, down), 1e-2)


def test_bounded_inputs(device: torch.device) -> None:
    x, ids, weights, gate_up, down = make(device, 2, 3, 2, 64, 32, torch.float16)
    first: Fp8Weight = replace(fp8.quantize_weight(gate_up), input_bound=0.5)
    close(OP(x, ids, weights, first, down), reference.experts(x, ids, weights, first, down), 1e-2)


def test_no_tokens(device: torch.device) -> None:
    made = make(device, 0, 3, 2, 64, 32, torch.float16)
    assert OP(*made).shape == (0, 64)


def test_experts_that_all_or_none_go_to(device: torch.device) -> None:
    x, _, weights, gate_up, down = make(device, 37, 6, 2, 64, 32, torch.float16)
    ids = torch.tensor([[5, 2]], device=device, dtype=torch.int32).expand(37, 2)
    close(OP(x, ids, weights, gate_up, down, by_pair=False), reference.experts(x, ids, weights, gate_up, down))


def test_tiles_of_known_sizes() -> None:
    """Each line of the table is what a call with its sizes gets, and can be computed."""
    for (count, hidden, width, form), lines in TILES.items():
        assert [most for most, *_ in lines] == sorted({most for most, *_ in lines})
        for most, *tiles in lines:
            assert choose_tiles(most, 1, count, hidden, width, form) == tuple(tiles)
            assert tiles[0].bm == tiles[1].bm
            assert form != "fp8 by square" or all(tile.bk == 128 and 128 % tile.bn == 0 for tile in tiles)
            for tile, matrices in zip(tiles, (2, 1), strict=True):
                room = (tile.bm + tile.bn * matrices) * tile.bk * tile.stages * WEIGHT_FORMS[form]
                assert room <= 227 << 10
    assert find_form(torch.bfloat16, False) == "16 bits" and find_form(fp8.FP8, True) == "fp8 by square"
    assert choose_tiles(3, 2, 5, 64, 32, "fp8")[0] == choose_tiling(6, 5, True, "fp8")


def test_blocks_always_suffice() -> None:
    for pairs in (1, 2, 7, 64, 513):
        for count in (1, 3, 128):
            for bm in (16, 128):
                used = min(count, pairs)
                worst = used - 1 + -(-(pairs - used + 1) // bm)  # one pair each, the rest for one expert
                even = sum(-(-(pairs // used + (e < pairs % used)) // bm) for e in range(used))
                assert max(worst, even) <= count_blocks(pairs, count, bm) <= pairs


RULES: list[tuple[Routing, int]] = [  # and the number of experts
    (SoftmaxRouting(2, p_norm=1), 8),
    (SoftmaxRouting(6, factor=3.0), 60),
    (SoftmaxRouting(6), 64),
    (SoftmaxRouting(2, p_norm=2), 8),
    (SoftmaxRouting(6, factor=16.0, num_groups=8, top_groups=3), 160),
    (SoftmaxRouting(4, p_norm=1, num_groups=4, top_groups=1), 12),  # more than a group has
    (SigmoidRouting(2), 8),
    (SigmoidRouting(8, factor=2.5, num_groups=8, top_groups=4), 256),
    (SigmoidRouting(3, normalized=False, num_groups=3, top_groups=2), 9),
    (SigmoidRouting(2, num_groups=4, top_groups=2), 4),  # a group of one has no second
    (SigmoidRouting(8, factor=2.5), 384),
    (SigmoidRouting(8, num_groups=2, top_groups=1), 512),
    (InputRouting(1), 16),
    (InputRouting(2), 128),
]


@pytest.mark.parametrize(("rule", "num_experts"), RULES, ids=str)
def test_route(device: torch.device, rule: Routing, num_experts: int) -> None:
    scores = torch.randn(9, num_experts + 3, device=device)[:, :num_experts] * 2
    scores[3] = 1.5  # all equal
    scores[4, 2:7] = 9.0
    scores[5, ::2] = 0.0
    scores[5, 1::2] = -0.0
    scores[6] = scores[6].round()  # many equal
    some = torch.randn(num_experts, device=device)
    some[1:4] = some[0]
    for correction in (None, some) if isinstance(rule, SigmoidRouting) else (None,):
        ids, weights = route(scores, rule, correction)
        expected_ids, expected = rule(scores, correction)
        assert ids.tolist() == expected_ids.tolist()
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_scores_that_are_no_numbers(device: torch.device) -> None:
    """Padding rows may have any; their experts must exist."""
    scores = torch.full((3, 8), float("nan"), device=device)
    scores[1:, ::2] = torch.tensor([[float("inf")], [float("-inf")]], device=device)
    for rule in (SoftmaxRouting(3, p_norm=1), SigmoidRouting(5, num_groups=4, top_groups=2), InputRouting(8)):
        for row in route(scores, rule, torch.randn(8, device=device))[0].tolist():
            assert len(set(row)) == rule.top_k and set(row) <= set(range(8))
