"""The choice of tokens in Triton against its definition in plain torch: on the GPU, or through Triton's interpreter."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from compile_program import PROGRAM
from driving import make_request, make_tiny, random_prompts, run, start
from queue_on_cpu import QueueOnCpu
from torch import Tensor

from text_generation_inference.kernels import choice, slot_state
from text_generation_inference.kernels.choice import Adjustments, GatheredRows, SamplingNeeds, Tops
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.slot_state import FILTERS, SlotState
from text_generation_inference.sampling import filters as filter_table
from text_generation_inference.sampling import penalties
from text_generation_inference.sampling.vocabulary import VocabularyPart

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.triton import adjust as adjust_module
from text_generation_inference.kernels.triton import filters
from text_generation_inference.kernels.triton.adjust import Adjust
from text_generation_inference.kernels.triton.choice import Choice, greedy_into

Found = TypeVar("Found")
NEUTRAL = [1.0, 0.0, 1.0, 1.0, 0.0, slot_state.ADJUSTED]


@pytest.fixture(scope="module")
def device(device_name: str) -> torch.device:
    return torch.device(device_name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_state(device: torch.device, num_slots: int = 5, max_tokens: int = 40, vocab: int = 90) -> SlotState:
    max_blocks = -(-max_tokens // 16)
    made = SlotState(num_slots, max_tokens, 1 + num_slots * max_blocks, 16, device)
    made.pages.copy_(torch.randint(0, vocab, made.pages.shape))
    made.last_tokens.copy_(torch.randint(0, vocab, (num_slots,)))
    made.block_tables.copy_(1 + torch.randperm(num_slots * max_blocks).view(num_slots, max_blocks))
    made.lengths.copy_(torch.randint(1, max_tokens - 1, (num_slots,)))
    made.num_prompt.copy_((torch.rand(num_slots, device=device) * made.lengths).long())
    made.seeds.copy_(torch.randint(-(2**63), 2**63 - 1, (num_slots,)))
    made.filters.copy_(torch.tensor(NEUTRAL))
    return made


def set_filters(state: SlotState, wanted: list[dict[str, float]]) -> None:
    for slot, numbers in enumerate(wanted):
        for name, value in {
            **dict(zip(FILTERS, NEUTRAL, strict=True)),
            "sampling_mode": slot_state.DRAWS,
            **numbers,
        }.items():
            state.numbers[name][slot] = float(value)


def twin(state: SlotState, device: torch.device) -> SlotState:
    other = SlotState(state.records.shape[0], state.max_tokens, state.pages.shape[0], 16, device)
    other.words.copy_(state.words)
    return other


def out_for(rows: int, device: torch.device) -> Tensor:
    return torch.zeros((2, rows), dtype=torch.int32, device=device)


class KeptChoice(Choice):
    """Leaves what it worked with."""

    def _make_room(self, *arguments: Any) -> list[Tensor]:
        self.spaces = super()._make_room(*arguments)
        return self.spaces


def small_choice(room: int = 8192, part: int = 4096) -> KeptChoice:
    op = KeptChoice()
    op.room, op.part = room, part
    return op


def words(values: list, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# The best token ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 320, 4097, 9000])
def test_greedy(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    one = make_state(device, 7)
    one.numbers["sampling_mode"].fill_(slot_state.PLAIN)
    one.numbers["sampling_mode"][5:] = torch.tensor([slot_state.DRAWS, slot_state.ADJUSTED])  # left to others
    two = twin(one, device)
    logits = (torch.randn(8, vocab, device=device) * 5).to(dtype)
    logits[1, vocab // 2] = math.nan
    logits[2, :] = -math.inf
    logits[3, : vocab - 1] = -math.inf
    rows = words([3, 0, 1, 4, 2, -1, 5, 6], device)
    ours, expected = out_for(9, device).fill_(-7), out_for(9, device).fill_(-7)
    greedy_into(logits, rows, one, ours)
    choice.greedy_into(logits, rows, two, expected)
    good = [0, 3, 4]
    assert torch.equal(ours[0], expected[0])
    ours_, expected_ = (out[1].view(torch.float32)[good] for out in (ours, expected))
    torch.testing.assert_close(ours_, expected_, rtol=1e-4, atol=1e-4)
    assert bool(ours[1].view(torch.float32)[[1, 2]].isnan().all())
    assert bool((ours[:, 5:] == -7).all())
    assert torch.equal(one.words, two.words)


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    slots, out = make_state(device), out_for(1, device)
    logits = torch.zeros((1, 9000), device=device)
    logits[0, [17, 18, 8999]] = 3.0
    for op, way in ((greedy_into, slot_state.PLAIN), (small_choice(), slot_state.ADJUSTED)):
        slots.numbers["sampling_mode"].fill_(way)
        out.zero_()
        op(logits, words([1], device), slots, out)
        assert out[0, 0] == 17


@pytest.mark.parametrize("vocab", [5, 4097])
@pytest.mark.parametrize("sampling_mode", ["greedy", "choose", "sample"])
def test_what_cannot_be_chosen_from_is_not_a_number(device: torch.device, vocab: int, sampling_mode: str) -> None:
    """The step after reads the id before the host sees the NaN, so it must exist whatever the scores are."""
    one = make_state(device, 8)
    if sampling_mode == "greedy":
        one.numbers["sampling_mode"].fill_(slot_state.PLAIN)
    if sampling_mode == "sample":
        one.filters.copy_(torch.tensor([0.8, 4, 0.9, 0.7, 0.1, 1]))
        one.filters[3, 1:3] = torch.tensor([0.0, 1.0])  # typical-p alone takes another way
        one.filters[1, 1:4] = torch.tensor([0.0, 1.0, 1.0])  # and so does min-p
    two = twin(one, device)
    logits = torch.randn(8, vocab, device=device)
    logits[0] = math.nan
    logits[1] = -math.nan
    logits[2, vocab - 1] = math.nan
    logits[3], logits[3, 0] = -math.inf, math.nan
    logits[4] = -math.inf
    logits[5] = math.inf
    logits[6, vocab - 1], logits[6, 1] = math.inf, math.nan
    rows = words([3, 1, 0, 5, 2, 7, 6, 4], device)
    ours, expected = out_for(8, device), out_for(8, device)
    if sampling_mode == "greedy":
        greedy_into(logits, rows, one, ours)
        choice.greedy_into(logits, rows, two, expected)
    else:
        small_choice()(logits, rows, one, ours)
        choice.choose_into(logits, rows, two, expected)
    assert ours[1].view(torch.float32).isnan().tolist() == [True] * 7 + [False]
    assert expected[1].view(torch.float32).isnan().tolist() == [True] * 7 + [False]
    assert ours[0, :7].tolist() == [0] * 7
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(one.words, two.words)


# Filters and draws ------------------------------------------------------------------------------------------------

WAYS = [
    {"sampling_mode": slot_state.ADJUSTED},
    {},
    {"temperature": 0.4},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.3},
    {"top_p": 0.97, "temperature": 2.0},
    {"top_p": 1e-6},
    {"typical_p": 0.4},
    {"typical_p": 0.9, "min_p": 0.2},
    {"min_p": 0.3},
    {"min_p": 1.0, "temperature": 0.1},
    {"top_k": 40, "top_p": 0.8, "typical_p": 0.7, "min_p": 0.01, "temperature": 0.8},
    {"top_p": 0.9, "typical_p": 0.5, "min_p": 0.1},
]


def kept_by_definition(logits: Tensor, state: SlotState, rows: Tensor) -> Tensor:
    numbers = {name: values[rows.long()] for name, values in state.numbers.items()}
    return filter_table.keep(logits.float() / numbers["temperature"][:, None], numbers) > -math.inf


def kept_by_kernels(op: KeptChoice, logits: Tensor, state: SlotState, rows: Tensor) -> tuple[Tensor, Tensor]:
    """From the thresholds that the kernels leave; and which scores are no further from one than they are rounded."""
    x = logits.float() / state.filters[rows.long(), :1]
    floor, mean, _, reach = op.spaces[2][: len(rows), :4].unbind(1)
    assert (filters.FLOOR.value, filters.MEAN.value, filters.REACH.value) == (0, 1, 3)
    distance = (x.amax(dim=-1, keepdim=True) - x - mean[:, None]).abs()
    kept = (x >= floor[:, None]) & (x > -math.inf) & (distance <= reach[:, None])
    rounding = 1e-5 * (1 + x.abs())
    return kept, ((x - floor[:, None]).abs() < rounding) | ((distance - reach[:, None]).abs() < rounding)


def check_choice(
    op: Choice, logits: Tensor, one: SlotState, rows: Tensor, needs: SamplingNeeds = choice.EVERY_FILTER
) -> None:
    """Tokens, log-probabilities, slots, and exactly the ids that filters keep."""
    two = twin(one, logits.device)
    ours, expected = out_for(len(rows), logits.device), out_for(len(rows), logits.device)
    op(logits, rows, one, ours, needs)
    choice.choose_into(logits, rows, two, expected, needs)
    real = rows >= 0
    wrong = [(row, one.filters[rows[row]].tolist()) for row in (ours[0] != expected[0]).nonzero()[:, 0] if real[row]]
    assert not wrong
    ours_, expected_ = (out[1].view(torch.float32)[real] for out in (ours, expected))
    torch.testing.assert_close(ours_, expected_, rtol=1e-4, atol=1e-4)
    assert torch.equal(one.words, two.words)
    if needs.adjustments is None:
        numbers = one.filters[rows.clamp(min=0).long()]
        limited = (numbers[:, 1] > 0) & (numbers[:, 1] < logits.shape[1])
        filtered = limited | (numbers[:, 2] < 1) | (numbers[:, 3] < 1) | (numbers[:, 4] > 0)
        filtered &= real & (numbers[:, 5] > 0)
        found, at_threshold = (part[filtered] for part in kept_by_kernels(op, logits, one, rows.clamp(min=0)))
        different = found != kept_by_definition(logits, one, rows.clamp(min=0))[filtered]
        if logits.device.type == "cpu":
            assert not bool(different.any())
        elif len(different):
            # A GPU divides and sums otherwise than the definition: what is next to a threshold by so little may be on
            # either side of it.
            shares = (logits.float() / numbers[:, :1]).softmax(dim=-1)[filtered]
            assert float((shares * (different & ~at_threshold)).sum(dim=-1).max()) < 1e-4


@pytest.mark.parametrize(("vocab", "room", "part"), [(50, 8, 64), (2500, 8192, 1024), (2500, 64, 4096)])
def test_every_filter(device: torch.device, vocab: int, room: int, part: int) -> None:
    """With room for everything near a threshold, for little, and for next to nothing."""
    one = make_state(device, len(WAYS))
    set_filters(one, WAYS)
    op = small_choice(room, part)
    logits = torch.randn(len(WAYS) + 1, vocab, device=device) * 2
    logits[:, 3] = -math.inf  # what a mask dropped
    check_choice(op, logits, one, words([*range(len(WAYS)), -1], device))


@pytest.mark.parametrize("seed", range(3))
def test_any_filters(device: torch.device, seed: int) -> None:
    """Random mixtures, distributions from flat to steep, ties of bfloat16, few ids left."""
    torch.manual_seed(seed)
    count = 5 if device.type == "cpu" else 60
    vocab = (320, 50257, 1200)[seed] if device.type != "cpu" else (320, 3000, 1200)[seed]
    one = make_state(device, count)
    one.filters[:, 0] = torch.rand(count) * 2 + 0.05
    one.filters[:, 1] = torch.where(torch.rand(count) < 0.5, torch.randint(1, vocab + 9, (count,)), 0)
    for place in (2, 3):
        one.filters[:, place] = torch.where(torch.rand(count) < 0.5, torch.rand(count) * 0.99 + 1e-3, 1.0)
    one.filters[:, 4] = torch.where(torch.rand(count) < 0.3, torch.rand(count), 0.0)
    one.filters[:, 5] = 1.0
    logits = torch.randn(count, vocab, device=device) * (torch.rand(count, 1, device=device) * 8 + 0.1)
    logits[0, torch.rand(vocab, device=device) < 0.9] = -math.inf
    if seed == 2:
        logits = logits.bfloat16()
    check_choice(small_choice((8192, 300, 20)[seed], 2048), logits, one, words(list(range(count)), device))


def test_fewer_ids_left_than_kept(device: torch.device) -> None:
    """As a grammar leaves them: each filter alone, after a step that left other choices in the workspace."""
    ways = [{"top_k": 40}, {"top_p": 0.9999}, {"min_p": 1e-6}, {"typical_p": 0.9999}]
    one = make_state(device, len(ways))
    set_filters(one, ways)
    rows = words(list(range(len(ways))), device)
    choice = small_choice(8192, 512)
    check_choice(choice, torch.randn(len(ways), 1000, device=device), one, rows)
    logits = torch.full((len(ways), 1000), -math.inf, device=device)
    for row in range(len(ways)):
        logits[row, [row, 50 + row, 700 + row]] = torch.tensor([1.0, 2.0, 3.0], device=device)
    check_choice(choice, logits, one, rows)


def test_ties_stay_with_the_last_kept(device: torch.device) -> None:
    """Few distinct scores, as of equal rows of the embedding; more of one than the list holds."""
    vocab = 700
    ways = [{"top_k": 5}, {"top_k": 300}, {"top_p": 0.6}, {"top_p": 0.99}, {"typical_p": 0.5}, {"typical_p": 0.3}]
    one = make_state(device, len(ways))
    set_filters(one, ways)
    logits = torch.randint(-3, 3, (len(ways), vocab), device=device).float() * 0.75
    logits[:, 9] = 3.0
    rows = words(list(range(len(ways))), device)
    for room in (8192, 40):
        check_choice(small_choice(room, 512), logits, one, rows)
    check_choice(small_choice(40, 512), torch.zeros(2, 100, device=device), one, rows[:2])


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    """To the last bit, and whatever came before."""
    ways = [WAYS[n] for n in (4, 7, 13, 14)]
    one = make_state(device, len(ways))
    set_filters(one, ways)
    logits = torch.randn(len(ways), 3000, device=device)
    op = small_choice(200, 1024)
    before = one.words.clone()
    together = out_for(len(ways), device)
    op(logits, words([0, 1, 2, 3], device), one, together)
    facts = op.spaces[2][:4].clone()
    for row in range(1 if device.type == "cpu" else 0, len(ways), 2 if device.type == "cpu" else 1):
        one.words.copy_(before)
        alone = out_for(2, device)
        op(logits[[row, 0]], words([row, -1], device), one, alone)
        assert torch.equal(alone[:, 0], together[:, row])
        assert torch.equal(op.spaces[2][0], facts[row])


def test_plain_rows_are_left_alone(device: torch.device) -> None:
    """In a batch with all others: their tokens were chosen before."""
    one = make_state(device, 5)
    set_filters(
        one,
        [
            {"sampling_mode": slot_state.PLAIN},
            {"top_k": 4},
            {"sampling_mode": slot_state.ADJUSTED},
            {"sampling_mode": slot_state.PLAIN},
            {},
        ],
    )
    two = twin(one, device)
    logits = torch.randn(5, 600, device=device)
    rows = words([3, 1, 0, 2, 4], device)
    ours, expected = out_for(5, device).fill_(-7), out_for(5, device).fill_(-7)
    small_choice(64, 256)(logits, rows, one, ours)
    choice.choose_into(logits, rows, two, expected)
    assert torch.equal(ours[0], expected[0]) and torch.equal(one.words, two.words)
    assert (ours == -7).all(dim=0).tolist() == [True, False, True, False, False]
    greedy_into(logits, rows, one, ours)
    assert not bool((ours == -7).any()) and bool((one.lengths == two.lengths + words([1, 0, 0, 1, 0], device)).all())


def test_draws_are_from_the_filtered_distribution(device: torch.device) -> None:
    """Of many seeds: exactly the ids that the definition keeps, as often as they are likely."""
    count, vocab = (8, 12) if device.type == "cpu" else (4000, 12)
    logits = torch.randn(1, vocab, device=device).expand(count, vocab).contiguous()
    for name, value in (("top_k", 3.0), ("top_p", 0.6), ("typical_p", 0.5)):
        slots = make_state(device, count)
        set_filters(slots, [{name: value}] * count)
        out = out_for(count, device)
        small_choice(64, 16)(logits, torch.arange(count, dtype=torch.int32, device=device), slots, out)
        numbers = {name: torch.tensor([value], device=device)}
        chances = filter_table.keep(logits[:1], numbers, numbers).softmax(-1)[0]
        shares = torch.bincount(out[0], minlength=vocab) / count
        assert not bool((shares > 0)[chances == 0].any())
        assert float((shares - chances).abs().max()) < 4 * math.sqrt(0.25 / count)


# The best ids -----------------------------------------------------------------------------------------------------


def check_tops(op: Choice, logits: Tensor, state: SlotState, rows: Tensor, wanted: list[int], room: int) -> None:
    wanting = [row for row, count in enumerate(wanted) if count]
    table = torch.zeros((len(wanted), 2), dtype=torch.int32, device=logits.device)
    for place, row in enumerate(wanting):
        table[row] = words([wanted[row], place], logits.device)
    found = [torch.full((len(wanting), 1 + 2 * room), -5, dtype=torch.int32, device=logits.device) for _ in range(2)]
    other = twin(state, logits.device)
    asked = [SamplingNeeds(True, True, True, tops=Tops(table, out)) for out in found]
    op(logits, rows, state, out_for(len(rows), logits.device), asked[0])
    choice.choose_into(logits, rows, other, out_for(len(rows), logits.device), asked[1])
    assert torch.equal(state.words, other.words)
    for ours, expected in zip(*found, strict=True):
        count = int(expected[0])
        assert int(ours[0]) == count
        assert ours[1 : 1 + count].tolist() == expected[1 : 1 + count].tolist()
        ours_, expected_ = (out[1 + room : 1 + room + count].view(torch.float32) for out in (ours, expected))
        torch.testing.assert_close(ours_, expected_, rtol=1e-4, atol=1e-4)


def test_best_ids(device: torch.device) -> None:
    """Alone and next to filters, with ties at the last place and at all places, with few ids left, with none."""
    state = make_state(device, 8)
    set_filters(
        state,
        [
            {"sampling_mode": slot_state.ADJUSTED},
            {"top_k": 4},
            {"top_p": 0.9, "temperature": 3.0},
            {"typical_p": 0.5},
            {},
        ],
    )
    vocab = 600
    logits = torch.randn(8, vocab, device=device)
    logits[0, [5, 77, 78, 590]] = 6.0
    logits[5, 7:] = -math.inf
    logits[6] = 1.5
    logits[7, 3] = math.nan
    wanted = [3, 5, 2, 0, 1, 5, 4, 2]
    check_tops(small_choice(8192, 256), logits, state, words(list(range(8)), device), wanted, 9)
    check_tops(small_choice(60, 256), logits, state, words(list(range(8)), device), wanted, 6)


# Before the temperature -------------------------------------------------------------------------------------------


def make_adjustments(state: SlotState, rows: Tensor, vocab: int, every: bool = False) -> Adjustments:
    """A random part of the rows with some of everything."""
    device, count = rows.device, len(rows)
    real = [row for row in range(count) if int(rows[row]) >= 0]
    kinds = {row: torch.rand(4) < (1.1 if every else 0.5) for row in real}
    adjusted = [row for row in real if bool(kinds[row].any())]
    places = {row: place for place, row in enumerate(adjusted)}
    penalised, marked, biased, masked = ([row for row in adjusted if kinds[row][k]] for k in range(4))
    biases = [
        (places[row], int(token), float(torch.randn(()))) for row in biased for token in torch.randperm(vocab)[:5]
    ]
    bits = [torch.randint(-(2**31), 2**31, (len(some), -(-vocab // 32))).int().to(device) for some in (marked, masked)]
    if biases:
        columns = [words([bias[k] for bias in biases], device) for k in range(2)]
        values = torch.tensor([bias[2] for bias in biases], device=device).view(torch.int32)
        bias_table = torch.stack([*columns, values])
    for name in penalties.FIELDS:
        state.numbers[name].copy_(torch.rand(state.records.shape[0]) + 0.5)
    state.numbers["frequency_by_length"].copy_(torch.arange(state.records.shape[0]) % 2)
    return Adjustments(
        rows=words(
            [[r, marked.index(r) if r in marked else -1, masked.index(r) if r in masked else -1] for r in adjusted],
            device,
        ),
        places=words([places.get(row, -1) for row in range(count)], device),
        green=bits[0] if marked else None,
        delta=2.0,
        penalised=words([places[row] for row in penalised], device) if penalised else None,
        longest=int(state.lengths[rows[penalised].long()].max()) if penalised else 0,
        biases=bias_table if biases else None,
        allowed=bits[1] if masked else None,
    )


@pytest.mark.parametrize(("vocab", "dtype"), [(320, torch.float32), (5001, torch.bfloat16)])
def test_adjustments(device: torch.device, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories of several stretches, more rows than tables, tokens that repeat; the tables are clean again."""
    monkeypatch.setattr(adjust_module, "_TABLES", 2)
    monkeypatch.setattr(adjust_module, "_HISTORY", 256)
    state = make_state(device, 7, 900, vocab)
    state.pages[state.block_tables[2:4].long()] %= 3
    state.lengths[1] = 1
    rows = words([3, -1, 0, 2, 6, 5, 1], device)
    op = Adjust()
    for every in (True, False):
        wanted = make_adjustments(state, rows, vocab, every)
        logits = (torch.randn(len(rows), vocab, device=device) * 3).to(dtype)
        before = logits.clone()
        ours, expected = op(logits, rows, state, wanted), choice.adjust(logits, rows, state, wanted)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(before, logits)
        assert op._tables is not None and not bool(op._tables.any())


def test_everything_together(device: torch.device) -> None:
    vocab = 400
    state = make_state(device, 6, 60, vocab)
    set_filters(state, [WAYS[n] for n in (0, 4, 7, 10, 13, 2)])
    rows = words([5, 3, -1, 0, 1, 2, 4], device)
    logits = torch.randn(len(rows), vocab, device=device) * 3
    asked = SamplingNeeds(True, True, True, adjustments=make_adjustments(state, rows, vocab))
    check_choice(small_choice(100, 256), logits, state, rows, asked)
    asked.adjustments = make_adjustments(state, rows, vocab)
    two = twin(state, device)
    table = words([[2, 0], [0, 0], [0, 0], [3, 1], [0, 0], [5, 2], [0, 0]], device)
    found = [torch.zeros((3, 21), dtype=torch.int32, device=device) for _ in range(2)]
    for op, slots, out in ((small_choice(100, 256), state, found[0]), (choice.choose_into, two, found[1])):
        asked.tops = Tops(table, out)
        op(logits, rows, slots, out_for(len(rows), device), asked)
    assert torch.equal(found[0][:, :11], found[1][:, :11])
    assert torch.equal(state.words, two.words)


def test_a_batch_without_filters_needs_two_kernels(device: torch.device) -> None:
    """What nobody asks for is not queued: the flags must be enough for what is asked."""
    state = make_state(device, 3)
    set_filters(state, [{"sampling_mode": slot_state.ADJUSTED}, {}, {"temperature": 0.5}])
    logits = torch.randn(3, 5000, device=device)
    check_choice(small_choice(), logits, state, words([2, 0, 1], device), SamplingNeeds())
    set_filters(state, [{"sampling_mode": slot_state.ADJUSTED}, {"min_p": 0.2}, {"temperature": 0.5}])
    check_choice(small_choice(), logits, state, words([2, 0, 1], device), SamplingNeeds(filters=True))
    set_filters(state, [{"sampling_mode": slot_state.ADJUSTED}, {"typical_p": 0.2}, {"min_p": 0.5}])
    check_choice(small_choice(64), logits, state, words([2, 0, 1], device), SamplingNeeds(filters=True, typical=True))


# Ranks ------------------------------------------------------------------------------------------------------------


class _Waits(Exception):
    """A rank has said what it has."""

    def __init__(self, said: Tensor) -> None:
        self.said = said


def in_turns(world: int, size: int, compute: Callable[[VocabularyPart], Found]) -> list[Found]:
    """What each rank computes. They come one after the other, and start again with what all have said so far."""
    answers: list[Tensor] = []
    while True:
        said: list[Tensor] = []
        found: list[Found] = []
        for rank in range(world):
            left = iter(answers)

            def exchange(x: Tensor, left: Iterator[Tensor] = left) -> Tensor:
                answer = next(left, None)
                if answer is None:
                    raise _Waits(x)
                return answer

            try:
                found.append(compute(VocabularyPart.of_rank(size, rank, world, exchange)))
            except _Waits as waits:
                said.append(waits.said)
        if found:
            assert not said
            return found
        answers.append(torch.cat(said, dim=-1))


def of_part(wanted: Adjustments, part: VocabularyPart) -> Adjustments:
    """What a rank is told."""
    masks = [wanted.green, wanted.allowed]
    green, allowed = (None if m is None else torch.from_numpy(part.cut(m.cpu().numpy())).to(m.device) for m in masks)
    biases = wanted.biases
    if biases is not None:
        biases = biases[:, (biases[1] >= part.start) & (biases[1] < part.end)].clone()
        biases[1] -= part.start
    return replace(wanted, green=green, allowed=allowed, biases=biases)


def test_ranks_choose_as_one(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of unequal size, ties between ranks, what is not finite on one rank, everything that adjusts, and a row that
    is gathered."""
    monkeypatch.setattr("text_generation_inference.kernels.triton.choice._PART", 64)
    vocab = 301
    start = make_state(device, 8, 60, vocab)
    plain, draws = {"sampling_mode": slot_state.PLAIN}, {"temperature": 0.7}
    set_filters(start, [plain, plain, plain, draws, draws, {"sampling_mode": slot_state.ADJUSTED}, {"min_p": 0.05}, {}])
    rows = words([7, 3, -1, 0, 1, 6, 2, 4, 5], device)
    logits = torch.randn(len(rows), vocab, device=device) * 3
    logits[3, [100, 101, 150, 300]] = 40.0
    logits[4, 299] = math.nan
    logits[6] = -math.inf
    logits[7, 3] = math.nan
    wanted = make_adjustments(start, words([7, 3, -1, -1, -1, 6, -1, -1, 5], device), vocab, every=True)
    gathered = GatheredRows(torch.tensor([5], device=device), SamplingNeeds(filters=True))

    def compute(part: VocabularyPart) -> tuple[Tensor, Tensor]:
        state, out = twin(start, device), out_for(len(rows), device)
        mine = logits[:, part.start : part.end].contiguous()
        asked = SamplingNeeds(adjustments=of_part(wanted, part), gathered=gathered)
        greedy_into(mine, rows, state, out, part)
        small_choice(part=64)(mine, rows, state, out, asked, part)
        return state.words, out

    two, expected = twin(start, device), out_for(len(rows), device)
    choice.greedy_into(logits, rows, two, expected)
    choice.choose_into(logits, rows, two, expected, SamplingNeeds(filters=True, adjustments=wanted))
    assert expected[0, 3] == 100 and expected[1].view(torch.float32).isnan().nonzero()[:, 0].tolist() == [4, 6, 7]
    for state, out in in_turns(3, vocab, compute):
        assert torch.equal(state, two.words)
        assert torch.equal(out[0], expected[0])
        values, theirs = out[1].view(torch.float32), expected[1].view(torch.float32)
        torch.testing.assert_close(values, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)


# For real GPUs ----------------------------------------------------------------------------------------------------

POINTERS = {
    "*bf16": "logits",
    "*fp32": "scores filters parts facts listed penalties",
    "*i64": "lengths seeds prompts",
    "*i32": "slots places tops top_out out last_tokens pages page_tables plan bins ids rows green allowed penalised tables biases",
}
NUMBERS = (
    "logits_row filters_row out_row last_row tables_row top_row penalties_row record vocab start num_parts room top_room count adjusted "
    "wants_tops green_words allowed_words"
)
KERNELS = [
    ("filters", "look", 8, "PART"),
    ("filters", "draw", 8, "PART PAD"),
    ("filters", "join", 1, "PAD"),
    *(("filters", name, 8, f"PART PAD KIND{kind}") for name in ("count", "collect") for kind in (0, 1)),
    *(("filters", "bound", 4, f"PAD KIND{kind}") for kind in (0, 1)),
    *(("thresholds", "thresholds", 8, f"BLOCK PAD KIND{kind}") for kind in (0, 1)),
    ("adjust", "copy", 8, "PART"),
    *(("adjust", name, 4, f"HISTORY BLOCK_SIZE SHARED{shared}") for name in ("tally", "penalise") for shared in (0, 1)),
    ("adjust", "bias", 4, "BLOCK"),
]
VALUES = {
    "PART": 4096,
    "PAD": 32,
    "BLOCK": 512,
    "HISTORY": 1024,
    "BLOCK_SIZE": 16,
    "KIND0": 0,
    "KIND1": 1,
    "SHARED0": False,
    "SHARED1": True,
}


def test_kernels_compile(tmp_path: Path, device_name: str) -> None:
    if device_name == "cpu":
        pytest.skip("compiled by the test of the dry run")
    types = {name: kind for kind, names in POINTERS.items() for name in names.split()}
    types |= {**dict.fromkeys(NUMBERS.split(), "i32"), "delta": "fp32"}
    asked = [
        (
            90,
            (
                module,
                f"{name}_kernel",
                types,
                {v.rstrip("01"): VALUES[v] for v in values.split()},
                {"num_warps": warps},
            ),
        )
        for module, name, warps, values in KERNELS
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
    assert len(done.stdout.splitlines()) == len(asked)


# Under the runner -------------------------------------------------------------------------------------------------

PARAMS = [
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.2},
    {"typical_p": 0.6, "watermark": True},
    {"min_p": 0.05, "frequency_penalty": 1.1, "presence_penalty": 0.7},
    {"logit_bias": {7: 4.0, 9: -100.0}, "top_n_tokens": 2},
    {},
    {"top_n_sigma": 1.2, "presence_penalty": 0.5, "top_n_tokens": 3},  # left to the definition
    {"top_n_sigma": 0.5, "temperature": 2.0},
]


def test_under_the_runner(device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU the engine's own tests do this."""
    if device_name != "cpu":
        pytest.skip("done by the tests of the engine")
    tiny = make_tiny("Llama", {}, tmp_path / "model")
    asked = [
        make_request(n, prompt, 3, seed=n, **PARAMS[n])
        for n, prompt in enumerate(random_prompts(320, [3, 9, 5, 4, 7, 6, 8], 5))
    ]
    plain = start(tiny.folder, device="cpu", custom_kernels=False)
    expected = run(plain, asked)
    plain.close()
    ops = Ops("choice in Triton", greedy_into=greedy_into, choose_into=small_choice(8192, 512))
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: QueueOnCpu(tmp_path, ops))
    engine = start(tiny.folder, max_batch_size=7, max_total_tokens=64)
    for ours, theirs in zip(run(engine, asked), expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
        assert [list(top) for top in ours.top_tokens] == [list(top) for top in theirs.top_tokens]
    engine.close()
