"""Ranks that share a vocabulary choose what one rank chooses, and say to each other no more than they must."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import as_ranks
from sampling_cases import MIXED, NUM_SLOTS, VOCAB, admission, bf16_logits, make_known, make_sampler
from torch import Tensor

from text_generation_inference.kernels import choice
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.slot_state import DRAWS, NUMBER_FIELDS, PLAIN, SlotState
from text_generation_inference.layers.embedding import VocabWeight
from text_generation_inference.parallel import Parallel
from text_generation_inference.runner.prompt_scores import PromptScores, read_scores, score, score_padded, take_padded
from text_generation_inference.sampling.bits import cut, pack
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.sampled_tokens import SampledTokens
from text_generation_inference.sampling.sampler import Sampler
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, SamplingParams

WHOLE = VocabularyPart.whole(VOCAB)
ASKED: list[dict[str, Any]] = [
    *MIXED,
    {"do_sample": True},
    {"temperature": 0.6, "repetition_penalty": 0.7},
    {"typical_p": 0.5},
    {"min_p": 0.1, "logit_bias": {150: 9.0, 151: 9.0, 3: -1.0}},
    {"do_sample": True, "watermark": True, "frequency_penalty": 0.5},
    {"presence_penalty": 1.5, "top_n_tokens": 2},
]


def part_of(parallel: Parallel, size: int = VOCAB) -> VocabularyPart:
    return VocabularyPart.of_rank(size, parallel.rank, parallel.world, parallel.all_gather_last)


def of_part(logits: Tensor, part: VocabularyPart) -> Tensor:
    return logits[:, part.start : part.end].clone()


def shared(world: int, choose: Callable[[VocabularyPart], SampledTokens]) -> SampledTokens:
    """What all ranks have found, which is the same."""
    first, *others = as_ranks(world, lambda parallel: choose(part_of(parallel)))
    for other in others:
        assert torch.equal(other.token_ids, first.token_ids)
        assert torch.equal(other.logprobs.view(torch.int32), first.logprobs.view(torch.int32))
        assert other.read_tops() == first.read_tops()
    return first


def assert_same(found: SampledTokens, expected: SampledTokens, rows: int) -> None:
    assert found.token_ids[:rows].tolist() == expected.token_ids[:rows].tolist()
    torch.testing.assert_close(found.logprobs[:rows], expected.logprobs[:rows])
    tops = [(top.row, top.token_ids) for top in expected.read_tops()]
    assert [(top.row, top.token_ids) for top in found.read_tops()] == tops


@given(
    st.lists(st.sampled_from(ASKED), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    st.permutations(range(NUM_SLOTS)),
    st.sets(st.integers(0, NUM_SLOTS - 1)),
    st.sampled_from([2, 3, 4, 7]),
    st.integers(0, 10_000),
)
@settings(max_examples=20, deadline=None)
def test_any_number_of_ranks_chooses_the_same(
    wanted: list[dict], rows: list[int], masked: set[int], world: int, seed: int
) -> None:
    """Logits full of ties, everything that can be asked for, masks that may leave a rank nothing."""
    rng = np.random.default_rng(seed)
    admissions = [
        admission(slot, SamplingParams(**params), 0, rng.integers(0, VOCAB, 5 + slot).tolist())
        for slot, params in enumerate(wanted)
    ]
    logits = bf16_logits(NUM_SLOTS, seed)
    masks = None
    if masked:
        allowed = [rng.random(VOCAB) < rng.choice([0.005, 0.5]) for _ in masked]
        for ids in allowed:
            ids[rng.integers(VOCAB)] = True
        masks = RowMasks(sorted(masked), np.stack([pack(ids) for ids in allowed]), {})
    expected = make_sampler(admissions, False).choose(logits.clone(), rows, masks)
    for pads, padding in ((False, 0), (True, 2)):
        given_ = torch.cat((logits, logits[:padding]))

        def choose(part: VocabularyPart, pads: bool = pads, given_: Tensor = given_) -> SampledTokens:
            sampler = make_sampler(admissions, pads, vocabulary=part)
            sampler.choose(of_part(given_, part), rows, masks)  # what is kept is right the second time too
            return sampler.choose(of_part(given_, part), rows, masks)

        assert_same(shared(world, choose), expected, NUM_SLOTS)


def make_state(admissions: list[Admission]) -> SlotState:
    state = SlotState(NUM_SLOTS, 64, 1, 16, torch.device("cpu"))
    for admitted in admissions:
        slot, request = admitted.slot, admitted.request
        state.lengths[slot], state.seeds[slot] = len(request.token_ids), request.seed
        for name in NUMBER_FIELDS:
            mode = DRAWS if request.sampling.samples else PLAIN
            state.numbers[name][slot] = mode if name == "sampling_mode" else float(getattr(request.sampling, name))
    return state


@pytest.mark.parametrize("world", [2, 4])
def test_slots_of_all_ranks_get_the_same_tokens(world: int) -> None:
    """Ties between ranks fall to the lowest id; what is not finite on one rank spoils the row on all."""
    asked: list[dict[str, Any]] = [{}, {"do_sample": True}, {}, {"do_sample": True}, {}, {}]
    admissions = [admission(slot, SamplingParams(**params), 3 + slot) for slot, params in enumerate(asked)]
    logits = bf16_logits(NUM_SLOTS + 1, 3)
    logits[0, [99, 100, 399]] = 40.0
    logits[2, 390] = math.nan
    logits[3, 5] = math.nan
    logits[4] = -math.inf
    logits[5, 7] = math.inf
    slots = torch.tensor([0, 1, 2, 3, 4, 5, -1], dtype=torch.int32)

    def choose(part: VocabularyPart) -> tuple[Tensor, Tensor]:
        state, out = make_state(admissions), torch.full((2, 7), -7, dtype=torch.int32)
        choice.greedy_into(of_part(logits, part), slots, state, out, part)
        choice.choose_into(of_part(logits, part), slots, state, out, choice.SamplingNeeds(), part)
        return state.words, out

    words, out = choose(WHOLE)
    found = as_ranks(world, lambda parallel: choose(part_of(parallel)))
    assert out[0, 0] == 99 and out[1].view(torch.float32).isnan().tolist() == [False] * 2 + [True] * 5
    for words_of_rank, out_of_rank in found:
        assert torch.equal(words_of_rank, words)
        assert out_of_rank[0].tolist() == out[0].tolist()
        numbers, expected = out_of_rank[1].view(torch.float32), out[1].view(torch.float32)
        torch.testing.assert_close(numbers, expected, equal_nan=True)


def test_rows_are_gathered_only_if_they_need_the_order_of_all_ids() -> None:
    """Others cost a few numbers for each rank."""
    asked: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "repetition_penalty": 1.2},
        {"top_p": 0.5},
        {},
        {"watermark": True},
        {},
    ]
    admissions = [admission(slot, SamplingParams(**params), 3 + slot) for slot, params in enumerate(asked)]
    logits = bf16_logits(NUM_SLOTS, 8)
    said: list[tuple[int, ...]] = []

    def choose(parallel: Parallel) -> None:
        def exchange(x: Tensor) -> Tensor:
            if parallel.rank == 0:
                said.append(tuple(x.shape))
            return parallel.all_gather_last(x)

        part = VocabularyPart.of_rank(VOCAB, parallel.rank, parallel.world, exchange)
        sampler = make_sampler(admissions, False, vocabulary=part)
        sampler.choose(of_part(logits[:5], part), [0, 1, 3, 4, 5], None)
        sampler.choose(of_part(logits, part), [0, 1, 2, 3, 4, 5], None)

    as_ranks(2, choose)
    assert said == [(5, 5), (6, 5), (1, VOCAB // 2)]


@pytest.mark.parametrize("world", [2, 3])
def test_every_shape_is_met_in_warming_up(world: int) -> None:
    def play(parallel: Parallel) -> None:
        met: set[tuple] = set()

        def by_shape(function: Any, keeps: bool = False) -> Any:
            def run(*given: Any) -> Any:
                tensors = [part.clone() if isinstance(part, Tensor) else torch.from_numpy(part) for part in given]
                met.add((function.__qualname__, *(tuple(tensor.shape) for tensor in tensors)))
                return function(*tensors)

            return run

        part = part_of(parallel)
        known = make_known(60)
        sampler = Sampler(Ops(by_shape=by_shape), torch.device("cpu"), known, part, (0.5, 2.0), pads=True)
        for size in (1, 4):
            sampler.warm(torch.zeros(size, part.width))
        warm = set(met)
        masks = RowMasks([0], np.full((1, 1 + VOCAB // 32), -1, dtype=np.int32), {})
        for number, params in enumerate(ASKED):
            for size in (1, 4):
                known.lengths[:] = 9
                rows = [(number + row) % NUM_SLOTS for row in range(min(size, 3))]
                for slot in rows:
                    sampler.admit(admission(slot, SamplingParams(**params), 3))
                sampler.choose(of_part(bf16_logits(size, number), part), rows, masks)
        assert met == warm, met - warm

    as_ranks(world, play)


def test_scores_of_ranks_are_not_rounded() -> None:
    """A head in bfloat16 whose product a device has in float32: values between those of bfloat16 arrive."""
    numbers = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randint(-9, 10, (n, 32), generator=numbers).bfloat16() for n in (301, 4))

    def product(hidden: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
        found = hidden.float() @ weight.float().T
        return found if out is None else out.copy_(found)

    def compute(parallel: Parallel) -> Tensor:
        head = VocabWeight(Ops(logits=product), parallel, "head", 301, 32, is_head=True)
        head.weight = weight[head.vocabulary.start : head.vocabulary.end]
        return head.vocabulary.gather(head.logits(hidden, torch.zeros(4, head.vocabulary.width)))

    expected = product(hidden, weight)
    assert not torch.equal(expected, expected.bfloat16().float())
    for found in as_ranks(3, compute):
        assert found.dtype is torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("num_top", [0, 3, 8])
def test_prompts_are_scored_as_by_one_rank(world: int, num_top: int) -> None:
    logits, targets = bf16_logits(5, 1), torch.tensor([0, 133, 134, 399, 200])
    logits[3, [399, 150, 140, 2]] = 30.0  # equals, of several ranks and of one
    logits[4, 30] = math.nan
    expected = score(logits, targets, num_top, WHOLE)

    def compute(parallel: Parallel) -> tuple[PromptScores, PromptScores]:
        part = part_of(parallel)
        own = of_part(logits, part)
        padded = score_padded(own, targets, 8, part)
        return score(own, targets, num_top, part), take_padded(padded, num_top)

    assert expected.logprobs.isnan().tolist() == [False] * 4 + [True]
    wanted = read_scores(0, 0, [expected])
    if num_top:
        assert wanted.top_ids[3][:4] == [2, 140, 150, 399][:num_top]
    for both in as_ranks(world, compute):
        for found in both:
            torch.testing.assert_close(found.logprobs, expected.logprobs, equal_nan=True)
            read = read_scores(0, 0, [found])
            assert read.top_ids[:4] == wanted.top_ids[:4]
            for ours, theirs in zip(read.top_logprobs[:4], wanted.top_logprobs[:4], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(("start", "end"), [(0, 64), (32, 70), (33, 64), (1, 2), (90, 100), (64, 130)])
def test_sets_of_ids_are_cut_anywhere(start: int, end: int) -> None:
    is_in = np.random.default_rng(start).random((2, 100)) < 0.5
    words = np.stack([pack(row) for row in is_in])
    found = cut(words, start, end)
    bits = np.unpackbits(found.view(np.uint8), axis=-1, bitorder="little")[:, : end - start]
    expected = np.zeros((2, end - start), dtype=bool)
    expected[:, : max(0, min(end, 100) - start)] = is_in[:, start:end]
    assert (bits == expected).all()


@pytest.mark.parametrize(("size", "world"), [(50257, 2), (50257, 4), (9, 4), (10, 3)])
def test_parts_cover_a_vocabulary(size: int, world: int) -> None:
    parts = [VocabularyPart.of_rank(size, rank, world, lambda x: x) for rank in range(world)]
    ids = [token for part in parts for token in range(part.start, part.end)]
    assert ids == list(range(size))
    assert max(part.width for part in parts) == parts[0].most
