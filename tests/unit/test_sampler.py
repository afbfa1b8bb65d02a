"""One meaning on every path: logits full of ties through the sampler with exact and with padded rows, through the definition
of the ops for slots on the device, and through a plain statement of what docs/sampling.md says."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import MAX_TOKENS, MIXED, NUM_SLOTS, VOCAB, admission, bf16_logits, make_known, make_sampler
from torch import Tensor

from text_generation_inference.kernels.choice import choose_into
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.slot_state import DRAWS, NUMBER_FIELDS, PLAIN, SlotState
from text_generation_inference.sampling.bits import spread
from text_generation_inference.sampling.draw import exponential_noise, noise_keys
from text_generation_inference.sampling.mask import RowMasks
from text_generation_inference.sampling.sampler import Sampler
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, SamplingParams

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1.0, 0.5, 2.0]),
        "top_n_sigma": st.sampled_from([0.0, 0.0, 0.5, 1.3]),
        "top_k": st.sampled_from([0, 0, 1, 5, 300]),
        "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.77, 0.991]),
        "typical_p": st.sampled_from([1.0, 1.0, 0.6]),
        "min_p": st.sampled_from([0.0, 0.0, 0.07]),
    }
)


def expected_token(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> tuple[int, bool]:
    """As the documentation says, one id at a time in float64; and whether a border was too near to tell."""
    x = logits.astype(np.float64) / params.temperature
    near = False

    def shares() -> np.ndarray:
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    if params.top_n_sigma:
        floor = x.max() - params.top_n_sigma * x.std()
        near |= bool((np.abs(x - floor) < 1e-4).any())
        x = np.where(x >= floor, x, -math.inf)
    if params.top_k and params.top_k < len(x):
        x = np.where(x >= np.sort(x)[-params.top_k], x, -math.inf)
    if params.top_p < 1:
        p = shares()
        above = (x[None] > x[:, None]) @ p
        near |= bool((np.abs(above - params.top_p) < 1e-5).any())
        x = np.where(above < params.top_p, x, -math.inf)
    if params.typical_p < 1:
        p = shares()
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = np.abs(-np.log(p) + np.nansum(p * np.log(p)))
        before = (distance[None] < distance[:, None]) @ p
        ordered = np.unique(distance[np.isfinite(distance)])
        near |= bool((np.abs(before - params.typical_p) < 1e-5).any()) or bool((np.diff(ordered) < 1e-5).any())
        x = np.where(before < params.typical_p, x, -math.inf)
    if params.min_p:
        p = shares()
        near |= bool((np.abs(p / p.max() - params.min_p) < 1e-6).any())
        x = np.where(p >= params.min_p * p.max(), x, -math.inf)
    keys = noise_keys(torch.tensor([seed]), torch.tensor([position]))
    noise = exponential_noise(*keys, torch.arange(VOCAB, dtype=torch.int32)[None])[0].double().log().numpy()
    values = x - noise
    best, second = np.sort(values)[[-1, -2]]
    return int(values.argmax()), near or best - second < 1e-5


def by_slots(logits: torch.Tensor, admissions: list[Admission], rows: list[int]) -> list[int]:
    state = SlotState(NUM_SLOTS, MAX_TOKENS, 1, 16, torch.device("cpu"))
    for admitted in admissions:
        slot, request = admitted.slot, admitted.request
        state.lengths[slot], state.seeds[slot] = len(request.token_ids), request.seed
        for name in NUMBER_FIELDS:
            mode = DRAWS if request.sampling.samples else PLAIN
            state.numbers[name][slot] = mode if name == "sampling_mode" else float(getattr(request.sampling, name))
    out = torch.full((2, len(rows) + 2), -7, dtype=torch.int32)
    slots = torch.tensor([*rows, -1, -1], dtype=torch.int32)
    choose_into(torch.cat((logits, logits[:2])), slots, state, out)
    assert out[0, len(rows) :].tolist() == [-7, -7]  # padding
    return out[0, : len(rows)].tolist()


@given(
    st.lists(PARAMS, min_size=NUM_SLOTS, max_size=NUM_SLOTS), st.integers(0, 10_000), st.permutations(range(NUM_SLOTS))
)
@settings(max_examples=40, deadline=None)
def test_one_meaning_on_every_path(wanted: list[dict], seed: int, rows: list[int]) -> None:
    logits = bf16_logits(NUM_SLOTS, seed)
    everybody = [SamplingParams(do_sample=True, **params) for params in wanted]
    admissions = [admission(slot, params, 3 + slot) for slot, params in enumerate(everybody)]
    exact = make_sampler(admissions, False).choose(logits.clone(), rows)
    padded = make_sampler(admissions, True).choose(torch.cat((logits, logits[:3])), rows)
    tokens = exact.token_ids.tolist()
    assert padded.token_ids[:NUM_SLOTS].tolist() == tokens
    assert by_slots(logits, admissions, rows) == tokens
    torch.testing.assert_close(padded.logprobs[:NUM_SLOTS], exact.logprobs)
    for row, slot in enumerate(rows):
        request = admissions[slot].request
        token, near = expected_token(logits[row].numpy(), request.sampling, request.seed, len(request.token_ids))
        assert near or tokens[row] == token, (request.sampling, row)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 3, 1], [3], [2, 2 + 1, 0, 4]])
@pytest.mark.parametrize("masked", [(), (0,), (0, 1)])
def test_rows_do_not_touch_each_other(rows: list[int], masked: tuple[int, ...]) -> None:
    """Everything at once: the same alone, among others, and among padding."""
    admissions = [admission(slot, SamplingParams(**params), 5 + slot) for slot, params in enumerate(MIXED)]
    logits = bf16_logits(len(rows), 3)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (NUM_SLOTS, -(-VOCAB // 32))).astype(np.int32)
    places = [row for row in masked if row < len(rows)]
    masks = RowMasks(places, words[[rows[row] for row in places]], {}) if places else None
    alone = []
    for row, slot in enumerate(rows):
        own = RowMasks([0], words[[slot]], {}) if row in places else None
        alone.append(make_sampler(admissions, False).choose(logits[[row]].clone(), [slot], own))
    expected = [sampled.token_ids[0].item() for sampled in alone]
    for pads, padding in ((False, 0), (True, 0), (True, 4)):
        sampler = make_sampler(admissions, pads)
        given = torch.cat((logits, torch.randn(padding, VOCAB)))
        for _ in range(2):  # what is kept for the rows is right the second time too
            found = sampler.choose(given.clone(), rows, masks)
            assert found.token_ids[: len(rows)].tolist() == expected
            torch.testing.assert_close(found.logprobs[: len(rows)], torch.cat([one.logprobs for one in alone]))
            tops = {top.row: top.token_ids for top in found.read_tops()}
            assert tops == {row: top.token_ids for row, one in enumerate(alone) for top in one.read_tops()}


class Shapes:
    """A device that makes a graph for each function and shape."""

    def __init__(self) -> None:
        self.met: set[tuple] = set()

    def by_shape(self, function, keeps=False):
        def run(scores, *given):
            sent = [each for each in given if isinstance(each, np.ndarray)]
            assert all(each.dtype in (np.int32, np.float32, np.bool_) for each in sent), "which can be sent together"
            assert all(isinstance(each, Tensor) for each in given[: len(given) - len(sent)]), "and comes last"
            shapes = (tuple(each.shape) for each in (scores, *given))
            self.met.add((function.__qualname__, len(sent), *shapes))
            before = scores.clone()
            found = function(scores if keeps else scores.clone(), *(torch.as_tensor(each) for each in given))
            assert scores.equal(before)
            return found

        return run


def test_every_shape_is_met_in_warming_up() -> None:
    shapes = Shapes()
    known = make_known(300)
    sampler = Sampler(
        Ops(by_shape=shapes.by_shape), torch.device("cpu"), known, VocabularyPart.whole(VOCAB), (0.5, 2.0), pads=True
    )
    for size in (1, 2, 8):
        sampler.warm(torch.zeros(size, VOCAB))
    warm = set(shapes.met)
    everything = [*MIXED, {"typical_p": 0.4}, {"min_p": 0.2}, {"do_sample": True}, {"top_n_tokens": 8}]
    masks = RowMasks([0], np.full((1, 1 + VOCAB // 32), -1, dtype=np.int32), {})
    for number, params in enumerate(everything):
        for size, length in ((1, 5), (2, 64), (8, 65), (8, 299)):
            known.lengths[:] = length
            rows = [(number + row) % NUM_SLOTS for row in range(min(size, 3))]
            for slot in rows:
                sampler.admit(admission(slot, SamplingParams(**params), 3))
            sampler.choose(bf16_logits(size, number), rows, masks)
    assert shapes.met == warm, shapes.met - warm


def test_a_greedy_batch_is_one_op() -> None:
    """What no row asks costs nothing."""
    calls = []

    def greedy(logits):
        calls.append(logits.shape)
        return torch.zeros(1, dtype=torch.int64), torch.zeros(1)

    sampler = make_sampler([admission(0, SamplingParams(), 3)], False, Ops(greedy=greedy))
    sampler.choose(torch.zeros(1, VOCAB), [0])
    with Counting() as counting:
        sampler.choose(torch.zeros(1, VOCAB), [0])
    assert len(calls) == 2
    assert counting.ops == ["aten.zeros.default"] * 3  # those of this test


@pytest.mark.parametrize("pads", [False, True])
def test_filters_that_need_no_order_sort_nothing(pads: bool) -> None:
    asked = [{"min_p": 0.1}, {"top_n_sigma": 1.0, "temperature": 0.7}, {"do_sample": True}, {}]
    admissions = [admission(slot, SamplingParams(**params), 3) for slot, params in enumerate(asked)]
    sampler = make_sampler(admissions, pads)
    with Counting() as counting:
        sampler.choose(bf16_logits(4, 1), [0, 1, 2, 3])
    assert not {op for op in counting.ops if "sort" in op or "topk" in op}


def test_rows_do_not_pay_for_the_filters_of_others() -> None:
    """A row is sorted if it asks for what needs an order itself."""
    asked = [
        {"min_p": 0.1},
        {"typical_p": 0.5},
        {"do_sample": True},
        {"top_p": 0.9, "top_n_sigma": 2.0},
        {"min_p": 0.2},
    ]
    admissions = [admission(slot, SamplingParams(**params), 3) for slot, params in enumerate(asked)]
    sampler = make_sampler(admissions, False)
    with Counting() as counting:
        sampler.choose(bf16_logits(5, 1), [0, 1, 2, 3, 4])
    assert counting.sorted_rows == [1, 1]


def test_the_best_ids_are_looked_for_once() -> None:
    sampler = make_sampler([admission(0, SamplingParams(top_n_tokens=3), 3)], False)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    with Counting() as counting:
        sampler.choose(logits, [0])
    assert sum("topk" in op for op in counting.ops) == 1


@pytest.mark.parametrize("count", [32, 37, 64])
def test_bits_mean_the_same_in_a_graph(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are kept and words are seen as bytes where torch runs op by op on the host, and only there."""
    words = torch.from_numpy(np.random.default_rng(count).integers(-(2**31), 2**31, (3, 2)).astype(np.int32))
    expected = [[float(int(row[i // 32]) >> (i % 32) & 1) * 2.5 for i in range(count)] for row in words]
    assert spread(words, 0.0, 2.5, count).tolist() == expected
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert spread(words, 0.0, 2.5, count).tolist() == expected


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.sorted_rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        if "sort" in str(func):
            self.sorted_rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))
