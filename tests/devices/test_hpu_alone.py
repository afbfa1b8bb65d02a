"""Whole engines on Gaudi, or on the CPU in its role, each in a process of its own: matrices and attention in FP8, eager
mode, and one model over two cards. The process of these tests never touches a card."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from driving import Tiny, make_tiny, run, start
from gaudi import run_alone
from hpu_batches import LIMITS
from hpu_engines import requests, sampled_requests, scores_of
from measured_fp8 import write_quant_config


class Card(NamedTuple):
    emulated: bool
    supports_fp8: bool
    fp8_max: float
    count: int


@pytest.fixture(scope="module")
def card(device_name: str) -> Card:
    if device_name not in ("cpu", "hpu"):
        pytest.skip("needs Gaudi, or the CPU in its role")
    said = run_alone(device_name, "import hpu_engines; hpu_engines.run_card()", PT_HPU_LAZY_MODE="1")
    return Card(*json.loads(said.splitlines()[-1]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """With layers that look at a window of tokens."""
    return make_tiny("Mistral", {}, tmp_path_factory.mktemp("mistral"))


def test_eager_mode_and_matrices_in_fp8(card: Card, tiny: Tiny, device_name: str) -> None:
    if not card.supports_fp8:
        pytest.skip("this card has no FP8")
    program = f"import hpu_engines; hpu_engines.run_eager({str(tiny.folder)!r})"
    first, second = map(json.loads, run_alone(device_name, program, PT_HPU_LAZY_MODE="0").splitlines()[-2:])
    engine = start(tiny.folder, device="cpu", **LIMITS)
    plain, sampled = (run(engine, asked[:5]) for asked in (requests(), sampled_requests()))
    engine.close()
    found, warm, planned, captured, late, breaks = first
    assert found == [[output.token_ids for output in each] for each in (plain, sampled)]
    assert (planned, captured, late, breaks) == (3, 3, 0, {})
    assert warm == 27 or not card.emulated
    errors, scores = second
    assert not errors
    assert max(abs(a - b.logprobs[0]) for a, b in zip(scores, plain, strict=True)) < 0.5


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_measured_fp8(card: Card, tiny: Tiny, tmp_path: Path, lazy: bool, device_name: str) -> None:
    """Products of attention and the head too: near to the definition on a CPU."""
    if not card.supports_fp8:
        pytest.skip("this card has no FP8")
    generation = {"device_for_scales": "GAUDI2"} if card.fp8_max == 240.0 else {}
    path = write_quant_config(tiny.folder, tmp_path, requests(), scale_method="maxabs_pow2", **generation)
    program = f"import hpu_engines; hpu_engines.run_measured({str(tiny.folder)!r}, {path!r}, {lazy})"
    kinds, found = run_alone(device_name, program, PT_HPU_LAZY_MODE=str(int(lazy))).splitlines()[-2:]
    assert kinds == "{'CardAttentionScales'} StaticFp8Weight"
    plain, expected = (scores_of(tiny.folder, "cpu", **more)[0] for more in ({}, {"quant_config": path}))
    off, noise = (
        torch.tensor([abs(a - b) for pair in zip(some, expected, strict=True) for a, b in together(*pair)])
        for some in (json.loads(found), plain)
    )
    assert noise.mean() > 0.005 and len(off) > 40 and off.mean() < 0.5 * noise.mean()


@pytest.fixture(scope="module")
def tiny_experts(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Mixtral", {}, tmp_path_factory.mktemp("mixtral"))


@pytest.mark.parametrize(
    ("form", "lazy"),
    [("fp8_fused_weights", True), ("fp8_fused_weights", False), ("fp8_fused_weights_dynamic", True)],
    ids=["measured, lazy", "measured, eager", "found, lazy"],
)
def test_experts_in_fp8(
    card: Card, tiny_experts: Tiny, tmp_path: Path, form: str, lazy: bool, device_name: str
) -> None:
    """By the form of the card's op that takes their scales: near to the definition on a CPU."""
    if not card.supports_fp8:
        pytest.skip("this card has no FP8")
    chosen: dict[str, object] = {"quantize": "fp8"}
    if form == "fp8_fused_weights":
        generation = {"device_for_scales": "GAUDI2"} if card.fp8_max == 240.0 else {}
        chosen = {"quant_config": write_quant_config(tiny_experts.folder, tmp_path, requests(), **generation)}
    program = f"import hpu_engines; hpu_engines.run_experts({str(tiny_experts.folder)!r}, {lazy}, **{chosen!r})"
    said = run_alone(device_name, program, PT_HPU_LAZY_MODE=str(int(lazy))).splitlines()[-1]
    found, names = json.loads(said)
    assert not card.emulated or f"mixture_of_experts.{form}" in names
    plain, expected = (scores_of(tiny_experts.folder, "cpu", **more)[0] for more in ({}, {**chosen, "dtype": None}))
    off, noise = (
        torch.tensor([abs(a - b) for pair in zip(some, expected, strict=True) for a, b in together(*pair)])
        for some in (found, plain)
    )
    assert len(off) > 40 and off.mean() < noise.mean(), (off.mean(), noise.mean())


def together(some: list[list[float]], others: list[list[float]]) -> list[tuple[float, float]]:
    """Scores of both, as far as they have the same tokens."""
    pairs = list(zip(some[0], others[0], strict=True))
    for token, other, *scores in zip(some[1], others[1], some[2], others[2], strict=True):
        if token != other:
            break
        pairs.append((scores[0], scores[1]))
    return pairs


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_a_scored_prompt_chooses_for_one_row(card: Card, tiny: Tiny, lazy: bool, device_name: str) -> None:
    """Which is met in warming up where no shape of the plan has one row, too."""
    program = f"import hpu_engines; hpu_engines.run_scored({str(tiny.folder)!r}, {lazy})"
    assert run_alone(device_name, program, PT_HPU_LAZY_MODE=str(int(lazy))).splitlines()[-1] == "4 0 0"


def test_two_cards_give_the_tokens_of_one(card: Card, tiny: Tiny, device_name: str) -> None:
    """In graphs, of prompts too, so that sums over cards are inside of them."""
    if card.count < 2 and not card.emulated:
        pytest.skip("there is one card")
    found = []
    for cards in (1, 2):
        program = f"import hpu_engines; hpu_engines.run_split({str(tiny.folder)!r}, {cards})"
        given = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}
        tokens, captured, planned, unplanned, late = json.loads(
            run_alone(device_name, program, **given).splitlines()[-1]
        )
        assert captured == planned > 0 and unplanned == late == 0
        found.append(tokens)
    assert found[0] == found[1]
