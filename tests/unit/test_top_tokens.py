"""Ties among the best tokens: bounded, the lowest ids first, the same on every path; bounds of numeric parameters."""

import math

import pytest
import torch

from text_generation_inference.errors import ValidationError
from text_generation_inference.kernels.choice import SamplingNeeds, Tops, choose_into
from text_generation_inference.kernels.slot_state import SlotState
from text_generation_inference.sampling.sampled_tokens import BestIds, SampledTokens
from text_generation_inference.sampling.tops import MORE_TIES, best_ids, count_kept, in_order, kept_ids
from text_generation_inference.text.prepare import prepare_request
from text_generation_inference.types import MIN_TEMPERATURE, ModelFacts, SamplingParams

VOCAB = 500


def on_host(logits: torch.Tensor, wanted: list[int]) -> list[list[int]]:
    """As the sampler does: candidates on the device, their order on the host."""
    limits = [count + MORE_TIES for count in wanted]
    ids, values = best_ids(logits.log_softmax(-1), max(limits))
    counts = count_kept(values, torch.tensor(wanted))
    found = BestIds(range(len(wanted)), limits, counts, *in_order(ids, values))
    exact_counts, *exact = kept_ids(logits.log_softmax(-1), torch.tensor(wanted), max(limits))
    assert exact_counts.tolist() == counts.tolist()
    for row, count in enumerate(counts.tolist()):
        for one, other in zip(in_order(*exact), (found.ids, found.logprobs), strict=True):
            assert one[row, :count].tolist() == other[row, :count].tolist()
    return [top.token_ids for top in SampledTokens(ids, values, found).read_tops()]


def on_slots(logits: torch.Tensor, wanted: list[int]) -> list[list[int]]:
    """As a device does that runs ahead: one room for all rows, the host takes what each may have."""
    rows = len(wanted)
    state = SlotState(rows, 16, 1, 4, torch.device("cpu"))
    state.filters[:] = torch.tensor([1.0, 0, 1, 1, 0, -1.0])
    state.lengths[:] = 1
    limits = [count + MORE_TIES for count in wanted]
    found = torch.zeros((rows, 1 + 2 * max(limits)), dtype=torch.int32)
    table = torch.tensor([[count, row] for row, count in enumerate(wanted)], dtype=torch.int32)
    out = torch.zeros((2, rows), dtype=torch.int32)
    needs = SamplingNeeds(counts=True, tops=Tops(table, found))
    choose_into(logits, torch.arange(rows, dtype=torch.int32), state, out, needs)
    room = max(limits)
    best = BestIds(range(rows), limits, found[:, 0], found[:, 1 : 1 + room], found[:, 1 + room :].view(torch.float32))
    return [top.token_ids for top in SampledTokens(out[0], out[1], best).read_tops()]


def test_ties_are_bounded_and_equal_on_all_paths() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB)
    logits[0] = 0.25  # everything ties
    logits[1, [490, 7, 99]] = 9.0  # a few do
    logits[2, 100:400] = 8.0  # many do, behind a better one
    logits[2, 450] = 9.0
    wanted = [2, 2, 3, 5]
    expected = [
        list(range(2 + MORE_TIES)),
        [7, 99, 490],
        [450, *range(100, 100 + 2 + MORE_TIES)],
        logits[3].argsort(descending=True)[:5].tolist(),
    ]
    assert on_host(logits, wanted) == on_slots(logits, wanted) == expected
    for row in range(4):
        assert on_host(logits[[row]], [wanted[row]]) == [expected[row]]
    logits[:, 20:] = -math.inf  # a mask leaves fewer than there is room for
    assert on_host(logits, [2, 2, 3, 19]) == on_slots(logits, [2, 2, 3, 19])


EXTREMES = [5e-324, 1e-300, 1e-38, 1e-10, 100.0001, 1e8, 3.5e38, 1e308, -1e-300, -1e308, math.inf, -math.inf, math.nan]
NUMBERS = (
    "temperature",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "top_p",
    "typical_p",
    "min_p",
    "top_n_sigma",
)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", EXTREMES)
def test_extreme_numbers_are_refused_by_name_or_harmless(name: str, value: float) -> None:
    params = SamplingParams(**{name: value})
    try:
        params.check(VOCAB)
    except ValidationError as error:
        assert str(error).startswith(f"`{name}` must be ")
        return
    assert (
        0 <= value <= 1 or (name == "top_n_sigma" and value <= 100) or (name.endswith("_penalty") and abs(value) <= 2)
    )
    single = torch.tensor(value, dtype=torch.float32)
    assert bool(single.isfinite())
    facts = ModelFacts(
        model_id="", dtype="", vocab_size=VOCAB, max_input_tokens=9, max_total_tokens=10, num_blocks=2, block_size=4,
        device="",
    )  # fmt: skip
    request = prepare_request(1, [3], params, _NoTokenizer(), facts)  # type: ignore[arg-type]
    if name == "top_n_sigma":  # what is small keeps the best alone; 0 would keep all
        assert bool(torch.tensor(request.sampling.top_n_sigma, dtype=torch.float32) > 0)
    if name == "temperature":  # what the engine divides by
        assert request.sampling.temperature == MIN_TEMPERATURE
        assert bool((torch.tensor([1e30, -1e30]) / request.sampling.temperature).isfinite().all())


class _NoTokenizer:
    eos_ids = frozenset[int]()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"temperature": 100.5}, "`temperature` must be <= 100. Given: 100.5"),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
        ({"repetition_penalty": 1e-3}, "`repetition_penalty` must be >= 0.01 and <= 100. Given: 0.001"),
        ({"repetition_penalty": 1e8}, "`repetition_penalty` must be >= 0.01 and <= 100. Given: 1e+08"),
        ({"logit_bias": {1: 3e38}}, "`logit_bias` for token 1 must be >= -1e+30 and <= 1e+30. Given: 3e+38"),
        ({"top_n_tokens": VOCAB + 1}, "`top_n_tokens` must be <= 500, the vocabulary's size"),
    ],
)
def test_bounds(params: dict, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**params).check(VOCAB)
    assert str(caught.value) == text


def test_a_token_has_the_log_probability_told_among_the_best() -> None:
    tops = BestIds([1], [3], torch.tensor([2]), torch.tensor([[7, 5, 0]]), torch.tensor([[-0.25, -0.5, 0.0]]))
    sampled = SampledTokens(torch.tensor([7, 5, 9]), torch.tensor([-0.25001, -0.50001, -3.0]), tops)
    assert sampled.read_tokens() == ([7, 5, 9], [pytest.approx(-0.25001), -0.5, -3.0])
