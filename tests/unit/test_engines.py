"""Which of several engines a request goes to as they come, fall silent, fail and come back."""

from types import SimpleNamespace

import pytest

from text_generation_inference.api.engines import Engines
from text_generation_inference.api.errors import UnavailableError
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.errors import EngineError
from text_generation_inference.types import EngineLoad, GenerationRequest, ModelFacts, SamplingParams

FACTS = ModelFacts(
    model_id="m",
    dtype="float32",
    vocab_size=10,
    max_input_tokens=999,
    max_total_tokens=1000,
    num_blocks=101,
    block_size=16,
    device="cpu",
)


def request(first: int, length: int = 200, **fields) -> GenerationRequest:
    return GenerationRequest(
        id=0,
        token_ids=[first, *range(length)],
        sampling=SamplingParams(),
        max_new_tokens=10,
        stop_token_ids=[],
        seed=0,
        **fields,
    )


@pytest.fixture
def engines(tmp_path):
    found = Engines(3, Metrics(100, 200, num_replicas=3))
    for number in range(3):
        found.attach(number, EngineClient(tmp_path / str(number)), FACTS)
    return found


def place(engines: Engines, wanted: GenerationRequest, output: list[int] | None = None) -> int:
    """Where it went; it has ended."""
    placement = engines.place(wanted)
    placement.first_token()
    placement.end(SimpleNamespace(output_ids=output))
    return placement.link.number


def test_prefix_then_load(engines):
    assert [place(engines, request(first)) for first in (1, 2, 3)] == [0, 1, 2]
    assert [place(engines, request(first, 300)) for first in (3, 2, 1)] == [2, 1, 0]
    assert place(engines, request(1, cache_salt="other")) == 2  # of another tenant: chosen longest ago
    assert engines.work_of(engines.links[0]) == (0, 0)


def test_answers_are_found_again(engines):
    assert place(engines, request(1, 20), list(range(500, 600))) == 0
    for first in (2, 3, 4, 5):
        place(engines, request(first, 20))
    longer = request(1, 20)
    longer.token_ids.extend([*range(500, 599), *range(50)])
    placement = engines.place(longer)
    assert placement.link.number == 0 and placement.key.tokens_at(7) == 112
    # Less than 16 tokens of its 120 that were computed are computed again, and all of the 50 behind them.
    assert engines.work_of(placement.link) == (1, len(longer.token_ids) - 112)


def test_one_that_is_silent_or_failed_is_passed_over(engines):
    assert place(engines, request(1)) == 0
    engines.links[0].client.responds = False
    assert [link.state for link in engines.links] == ["not responding", "up", "up"]
    assert place(engines, request(1)) == 1
    engines.links[0].client.responds = True
    assert place(engines, request(1, 300)) in (0, 1)
    engines.links[1].client.fail(EngineError("a step failed"))
    assert {place(engines, request(first)) for first in range(9)} == {0, 2}


def test_one_that_is_lost_holds_nothing_when_it_is_back(engines, tmp_path):
    assert place(engines, request(1)) == 0
    lost = engines.place(request(1))
    engines.detach(0, "it died")
    assert engines.links[0].state == "down"
    assert place(engines, request(1)) == 1
    engines.attach(0, EngineClient(tmp_path / "0"), FACTS)
    lost.end(SimpleNamespace(output_ids=[1, 2]))  # of the one before
    assert engines.work_of(engines.links[0]) == (0, 0)
    assert place(engines, request(1, 300)) == 1


def test_none_is_left(engines):
    for number in range(3):
        engines.detach(number, f"engine {number} died")
    assert not engines.any_usable
    with pytest.raises(UnavailableError, match="engine 0 died"):
        engines.place(request(1))


def test_generations_of_one_prompt_stay_together(engines):
    wanted = request(1)
    placements = [engines.place(wanted)]
    for _ in range(5):
        placements.append(engines.place(wanted, placements[-1]))
    assert {placement.link.number for placement in placements} == {0}
    assert engines.work_of(engines.links[0])[0] == 6
    assert engines.place(request(2), placements[-1]).link.number != 0
    for placement in placements:
        placement.end()
    assert engines.work_of(engines.links[0]) == (0, 0)


def test_a_full_cache(engines):
    assert place(engines, request(1)) == 0
    waits = engines.place(request(1))
    assert waits.link.number == 0
    engines.report(0, EngineLoad(1, 5, 2, 0, 0, 0))
    assert place(engines, request(1)) != 0


def test_one_engine_is_not_chosen(tmp_path):
    alone = Engines(1, Metrics(100, 200))
    with pytest.raises(UnavailableError, match="starting"):
        alone.place(request(1))
    alone.attach(0, EngineClient(tmp_path / "0"), FACTS)
    placement = alone.place(request(1))
    assert placement.key is None and not alone.are_several
    placement.end()
