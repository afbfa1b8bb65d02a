"""Models whose layers all read a window of tokens: long requests in a cache that holds their window and little more.

Prompts and outputs are several windows long. Before each step every block that is free and holds nothing findable is
filled with NaN: whoever reads one, even to multiply it with 0, has no tokens. What must come out comes from `transformers`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driving import Output, Tiny, make_request, make_tiny, random_prompts, reference, run, spoil_free_blocks, start
from queue_on_cpu import QueueOnCpu

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine
from text_generation_inference.launch.check import check_model, render

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, BLOCK = 24, 16
NEW = 60
PROMPTS = random_prompts(320, [130, 7, 61], seed=5)
TIGHT = {"max_batch_total_tokens": 4 * BLOCK, "max_batch_size": 3, "max_batch_prefill_tokens": 40}

Started = Callable[..., Engine]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Mistral", {"max_position_embeddings": 512}, tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[tuple[list[int], list[float]]]:
    return [reference(tiny.model, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(params=["native", "plain", "captured"])
def start_here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    def started(folder: Path, **settings: Any) -> Engine:
        if request.param == "captured":
            monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: QueueOnCpu(tmp_path))
        engine = start(folder, **{"custom_kernels": request.param == "native", **settings})
        spoil_free_blocks(engine)
        return engine

    return started


def compare(outputs: list[Output], expected: list[tuple[list[int], list[float]]]) -> None:
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        assert output.error is None
        assert output.token_ids == tokens
        assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_long_requests_in_a_cache_of_one_window(tiny: Tiny, expected: list, start_here: Started) -> None:
    """One after the other, and beside each other, where they are preempted; the longest fits in no cache as a whole."""
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    for blocks, caching in ((4, True), (5, False)):
        settings = {**TIGHT, "max_batch_total_tokens": blocks * BLOCK, "prefix_caching": caching}
        engine = start_here(tiny.folder, **settings)
        assert engine.facts.max_total_tokens == 512
        assert len(PROMPTS[0]) > engine.loop.scheduler.pool.num_usable * BLOCK
        compare(run(engine, requests, arrivals=[0, 2, 9]), expected)
        assert (engine.loop.scheduler.stats.num_preemptions > 0) == (blocks > 4)
        engine.close()


def test_the_next_turn_of_a_chat_finds_its_window(tiny: Tiny, expected: list, start_here: Started) -> None:
    """When the window has moved on, and what is behind it is gone; then with all of it there."""
    for blocks in (2 * 4, 60):
        engine = start_here(tiny.folder, **{**TIGHT, "max_batch_total_tokens": blocks * BLOCK})
        compare(run(engine, [make_request(0, PROMPTS[0], NEW)]), expected[:1])
        stats = engine.loop.scheduler.stats
        assert stats.num_cached_prompt_tokens == 0
        conversation = [*PROMPTS[0], *expected[0][0], 5]
        further = reference(tiny.model, conversation, 10)
        compare(run(engine, [make_request(1, conversation, 10)]), [further])
        computed = len(PROMPTS[0]) + NEW - 1
        assert stats.num_cached_prompt_tokens == computed // BLOCK * BLOCK
        if blocks == 60:
            earlier = [*PROMPTS[0][:100], 3]
            compare(run(engine, [make_request(2, earlier, 10)]), [reference(tiny.model, earlier, 10)])
            assert stats.num_cached_prompt_tokens == computed // BLOCK * BLOCK + 96
        engine.close()


def test_what_is_behind_the_window_still_counts(tiny: Tiny, start_here: Started) -> None:
    """In penalties, in prompts that are scored and in watermarks: as in a cache that holds everything, without a window."""
    asked: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": 0.3, "top_n_tokens": 2},
        {"decoder_input_details": True, "do_sample": True, "seed": 4},
        {"watermark": True, "frequency_penalty": 0.2, "frequency_by_length": False},
    ]
    requests = [make_request(n, PROMPTS[n], NEW, **params) for n, params in enumerate(asked)]
    tight = start_here(tiny.folder, **TIGHT)
    found = run(tight, requests)
    tight.close()
    roomy = start(tiny.folder, custom_kernels=False, max_batch_size=3, bucketing=True, max_total_tokens=256)
    assert roomy.resolved.window is None
    wanted = run(roomy, requests)
    roomy.close()
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
        assert mine.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=2e-4)
        assert [list(top) for top in mine.top_tokens] == [list(top) for top in theirs.top_tokens]
    assert len(found[1].prompt_logprobs) == len(PROMPTS[1]) - 1


def test_check_says_what_is_kept(tiny: Tiny) -> None:
    config = ServerConfig(model_id=str(tiny.folder), device="cpu", dtype="float32", max_batch_total_tokens=64)
    report = check_model(config)
    assert (report.window, report.limits["max_total_tokens"], report.kv_cache_tokens) == (WINDOW, 512, 64)
    assert f"a request keeps the last {WINDOW} tokens" in render(report)
