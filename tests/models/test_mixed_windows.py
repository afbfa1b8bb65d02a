"""Models of which some layers read a window of tokens and others all: long requests with blocks for little more than a
window beside blocks for all tokens.

Before each step every block that is free and holds nothing findable is filled with NaN, in the layers that it is a block
of: whoever reads one, even to multiply it with 0, has no tokens. What must come out comes from `transformers`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driving import Output, Tiny, make_request, make_tiny, random_prompts, reference, run, spoil_free_blocks, start
from queue_on_cpu import QueueOnCpu
from thread_ranks import ThreadRanks
from transformers_models import make as make_other

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine
from text_generation_inference.launch.check import check_model, render
from text_generation_inference.scheduler.blocks import BlockPool, WindowBlocks

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 16
NEW = 40
PROMPTS = random_prompts(320, [130, 7, 61], seed=5)
# All tokens of the requests have room in layers that keep them; in the others a window of 24 and a chunk have.
SETTINGS = {"max_batch_total_tokens": 24 * BLOCK, "max_batch_size": 3, "max_batch_prefill_tokens": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": {},
    "Gemma3": {},
    "Cohere2": {},
    "GptOss": {},
    "Llama4": {"attention_chunk_size": 24},
    "Olmo3": {},  # computed by transformers, over our cache
}

Started = Callable[..., Engine]


@pytest.fixture(scope="module", params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "Olmo3":
        return make_other(request.param, folder)
    return make_tiny(request.param, {"max_position_embeddings": 512, **FAMILIES[request.param]}, folder)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Gemma3", {"max_position_embeddings": 512}, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[tuple[list[int], list[float]]]:
    return [reference(tiny.model, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(params=["native", "plain", "captured"])
def start_here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    def started(folder: Path, num_beside: int | None = None, **settings: Any) -> Engine:
        if request.param == "captured":
            monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: QueueOnCpu(tmp_path))
        engine = start(folder, **{"custom_kernels": request.param == "native", **SETTINGS, **settings})
        if num_beside is not None:
            use_fewer(engine, num_beside)
        spoil_free_blocks(engine)
        return engine

    return started


def use_fewer(engine: Engine, num_beside: int) -> None:
    """Of the blocks of layers with a window, as if there were no more memory."""
    pool, scheduler = engine.loop.scheduler.pool, engine.loop.scheduler
    assert pool.beside is not None and num_beside < pool.beside.num_blocks and pool.beside.window is not None
    beside = WindowBlocks(num_beside, pool.block_size, pool.beside.window)
    fewer = BlockPool(pool.num_blocks, pool.block_size, pool.prefix_caching, None, beside)
    engine.loop.scheduler = type(scheduler)(scheduler.policy, fewer)


def compare(outputs: list[Output], expected: list[tuple[list[int], list[float]]]) -> None:
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        assert output.error is None
        assert output.token_ids == tokens
        assert output.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_long_requests_cost_their_window_where_no_more_is_read(tiny: Tiny, expected: list, start_here: Started) -> None:
    """Beside each other in chunks, where they find prefixes; then with so few blocks that they are preempted."""
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    engine = start_here(tiny.folder)
    resolved, scheduler = engine.resolved, engine.loop.scheduler
    assert resolved.partial_window == 24 and resolved.window is None
    assert resolved.num_window_blocks - 1 == 3 * 5 + 4  # windows of all, and a chunk
    sizes = {cache[0].shape[0] for cache in engine.rank.runner.kv_cache}
    assert sizes == {resolved.num_blocks, resolved.num_window_blocks}
    compare(run(engine, requests, arrivals=[0, 2, 9]), expected)
    conversation = [*PROMPTS[0], *expected[0][0], 5]
    compare(run(engine, [make_request(3, conversation, 10)]), [reference(tiny.model, conversation, 10)])
    computed = len(PROMPTS[0]) + NEW - 1
    assert scheduler.stats.num_cached_prompt_tokens == computed // BLOCK * BLOCK
    engine.close()
    engine = start_here(tiny.folder, 1 + 5, prefix_caching=False)
    compare(run(engine, requests, arrivals=[0, 2, 9]), expected)
    assert engine.loop.scheduler.stats.num_preemptions > 0
    assert len(PROMPTS[0]) > 5 * BLOCK
    engine.close()


def test_what_is_behind_the_window_still_counts(gemma: Tiny, start_here: Started) -> None:
    """In penalties, in prompts that are scored and in watermarks: as where all layers have the same blocks."""
    asked: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": 0.3, "top_n_tokens": 2},
        {"decoder_input_details": True, "do_sample": True, "seed": 4},
        {"watermark": True, "frequency_penalty": 0.2, "frequency_by_length": False},
    ]
    requests = [make_request(n, PROMPTS[n], NEW, **params) for n, params in enumerate(asked)]
    tight = start_here(gemma.folder, 1 + 7)
    found = run(tight, requests)
    tight.close()
    roomy = start(gemma.folder, custom_kernels=False, max_batch_size=3, bucketing=True, max_total_tokens=256)
    assert roomy.resolved.partial_window is None and roomy.loop.scheduler.pool.beside is None
    wanted = run(roomy, requests)
    roomy.close()
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
        assert mine.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=2e-4)
        assert [list(top) for top in mine.top_tokens] == [list(top) for top in theirs.top_tokens]
    assert len(found[1].prompt_logprobs) == len(PROMPTS[1]) - 1


@pytest.mark.parametrize("captured", [False, True])
def test_ranks(gemma: Tiny, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans carry both tables to two of them."""
    if captured:
        monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: QueueOnCpu(tmp_path))
    monkeypatch.setattr("text_generation_inference.engine.build.open_rank", ThreadRanks)
    engine = start(gemma.folder, custom_kernels=False, num_shard=2, **SETTINGS)
    assert engine.resolved.partial_window == 24
    use_fewer(engine, 1 + 7)
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    compare(run(engine, requests, arrivals=[0, 2, 9]), [reference(gemma.model, prompt, NEW) for prompt in PROMPTS])
    engine.close()


def test_a_chat_is_served_that_there_was_no_room_for(gemma: Tiny) -> None:
    """As much memory as 192 tokens take in all layers, of which two of three read a window: there is room for 320."""
    tokens = 192
    config = ServerConfig(model_id=str(gemma.folder), device="cpu", dtype="float32")
    report = check_model(config)
    assert report.kv_bytes_per_token is not None and report.far_bytes_per_token is not None
    assert report.far_bytes_per_token - 4 == (report.kv_bytes_per_token - 4) // 3
    settings = {"max_batch_size": 1, "max_batch_prefill_tokens": 16}
    engine = start(gemma.folder, custom_kernels=False, max_batch_total_tokens=20 * BLOCK, **settings)
    caches = engine.rank.runner.kv_cache
    taken = sum(tensor.nbytes for cache in caches for tensor in cache)
    of_padding = sum(tensor[0].nbytes for cache in caches for tensor in cache)
    assert taken - of_padding <= tokens * report.kv_bytes_per_token
    prompt = random_prompts(320, [280], seed=8)[0]
    compare(run(engine, [make_request(0, prompt, NEW)]), [reference(gemma.model, prompt, NEW)])
    engine.close()


def test_check_says_what_is_kept(gemma: Tiny) -> None:
    config = ServerConfig(model_id=str(gemma.folder), device="cpu", dtype="float32", max_batch_total_tokens=4096)
    report = check_model(config)
    assert (report.window, report.partial_window, report.kv_cache_tokens) == (None, 24, 4096)
    assert "a request keeps all of its last 24 tokens, and" in render(report)
    assert "of them in layers that read a window" in render(report)
