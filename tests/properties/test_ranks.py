"""Ranks' books: random traffic, aborts, preemption and steps for which some rank has no memory, through real runners.

Threads share a tiny model in the role of ranks; one runner beside them has it whole. All get the same plans. After every
step, and after every step that was taken back, all know the same of every request: slots, blocks, tokens, seeds
(`ThreadRunners.compare`). A rank that lacks memory may do so before its first collective, between any two, or behind the
last one, when all have chosen.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driving import make_tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from queue_on_cpu import QueueOnCpu
from thread_runners import Lack, ThreadRunners, make_loop, plain_device

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.engine.loop import EngineLoop
from text_generation_inference.types import GenerationRequest, SamplingParams

VOCAB, NUM_BLOCKS = 67, 14
ASKED: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"top_p": 0.8, "watermark": True},
    {"frequency_penalty": 0.6, "top_n_tokens": 2},
    {"decoder_input_details": True},
    {"logit_bias": {3: 3.0, 66: 2.0}, "min_tokens": 3},
]
CONFIG: dict[str, Any] = {"max_batch_size": 5, "max_total_tokens": 40, "max_batch_prefill_tokens": 12}


Place = tuple[str, int]  # where slots are, how many ranks
PLACES: list[Place] = [("host", 2), ("host", 3), ("device", 2)]


def small_blocks(device: CpuDevice) -> CpuDevice:
    device.limits = msgspec.structs.replace(device.limits, block_size=4)
    return device


WAYS = {
    "host": lambda cache_dir: small_blocks(plain_device(cache_dir)),
    "device": lambda cache_dir: small_blocks(QueueOnCpu(cache_dir)),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Place, ThreadRunners]]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_tiny("Llama", {"num_hidden_layers": 1, "vocab_size": VOCAB, "hidden_size": 32}, folder)
    with ExitStack() as stack:
        found: dict[Place, ThreadRunners] = {}
        for way, world in PLACES:
            config = ServerConfig(model_id=str(folder), cuda_graphs=[1, 2, 4], **CONFIG)
            make_device = partial(WAYS[way], tmp_path_factory.mktemp(f"{way}{world}"))
            runners = ThreadRunners(folder, world, config, make_device, NUM_BLOCKS, beside=True)
            stack.callback(runners.close)
            found[way, world] = runners
        yield found


@st.composite
def traffic(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(2, 9))
    requests = [
        GenerationRequest(
            id=number,
            token_ids=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)),
            sampling=SamplingParams(**draw(st.sampled_from(ASKED))),
            max_new_tokens=draw(st.integers(1, 16)),
            stop_token_ids=draw(st.sampled_from([[], [5, 6, 7]])),
            seed=draw(st.integers(0, 2**64 - 1)),
        )
        for number in range(count)
    ]
    return {
        "requests": requests,
        "arrivals": [draw(st.integers(0, 20)) for _ in requests],
        "aborts": [draw(st.one_of(st.none(), st.none(), st.integers(0, 30))) for _ in requests],
        "lacks": draw(
            st.dictionaries(st.integers(0, 40), st.builds(Lack, st.integers(0, 2), st.integers(0, 9)), max_size=4)
        ),
        "overlap": draw(st.booleans()),
    }


def play(runners: ThreadRunners, scenario: dict[str, Any]) -> tuple[dict[int, list[int]], EngineLoop]:
    """The tokens of each request."""
    runners.forget()  # releases come with the next plan, of which there was none
    runners.num_steps = runners.num_taken_back = 0
    runners.lacks = {step: Lack(lack.rank % runners.world, lack.place) for step, lack in scenario["lacks"].items()}
    loop = make_loop(runners, ServerConfig(**CONFIG), NUM_BLOCKS, scenario["overlap"])
    requests, tokens = scenario["requests"], dict[int, list[int]]()
    ended: set[int] = set()
    for tick in range(2000):
        for request, arrival, abort in zip(requests, scenario["arrivals"], scenario["aborts"], strict=True):
            if arrival == tick:
                loop.add(request)
            if abort == tick and abort >= arrival and request.id not in ended:
                loop.abort(request.id)
                ended.add(request.id)
        out = loop.step()
        loop.scheduler.check()
        if out is not None:
            ended |= {finish.request_id for finish in out.finished}
            for number, token in zip(out.request_ids, out.token_ids, strict=True):
                tokens.setdefault(number, []).append(token)
        if tick >= max(scenario["arrivals"]) and not loop.has_work:
            break
    assert len(ended) == len(requests)
    assert loop.scheduler.pool.num_free == loop.scheduler.pool.num_usable
    return tokens, loop


@pytest.mark.usefixtures("one_thread")
@given(scenario=traffic(), place=st.sampled_from(PLACES))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_books_of_ranks_stay_equal(started: dict[Place, ThreadRunners], scenario: dict, place: Place) -> None:
    play(started[place], scenario)
    assert started[place].num_taken_back <= len(scenario["lacks"])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("place", PLACES)
def test_lack_of_memory_on_any_rank_changes_no_token(started: dict[Place, ThreadRunners], place: Place) -> None:
    """With requests that are preempted, and one more lack wherever a step has been."""
    requests = [
        GenerationRequest(
            id=number,
            token_ids=[(7 * number + i) % VOCAB for i in range(9 + number)],
            sampling=SamplingParams(**asked),
            max_new_tokens=12,
            stop_token_ids=[],
            seed=number,
        )
        for number, asked in enumerate(ASKED)
    ]
    nothing: list[None] = [None] * len(requests)
    scenario = {"requests": requests, "arrivals": [0] * len(requests), "aborts": nothing, "overlap": True, "lacks": {}}
    expected, loop = play(started[place], scenario)
    assert loop.scheduler.stats.num_preemptions > 0
    for rank, at in ((0, 0), (1, 2), (0, 9)):
        lacks = {3: Lack(rank, at), 17: Lack(1 - rank, at)}
        assert play(started[place], {**scenario, "lacks": lacks})[0] == expected
        assert started[place].num_taken_back == 2
