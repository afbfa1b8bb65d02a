"""The paths that a pass can take, each with what must not change an answer: the same requests through all of them."""

import math
from pathlib import Path
from typing import Any

import pytest
from driving import make_request, random_prompts, run, start
from queue_on_cpu import QueueOnCpu

from text_generation_inference.engine.build import Engine

NEW = 20
SHARED = random_prompts(320, [40], seed=3)[0]  # longer than the windows of TINY, and two blocks that others can use
PROMPTS = [*random_prompts(320, [1, 5, 17], seed=3), SHARED, [*SHARED[:33], 7, 8]]
_LATE = [0, 0, 2, 3, 9]
_SMALL: dict[str, Any] = {"max_total_tokens": 64, "max_batch_size": 4}

Expected = list[tuple[list[int], list[float]]]  # of each prompt: tokens and their log-probabilities


def check(folder: Path, expected: Expected, arrivals: list[int] | None = None, **settings: Any) -> Engine:
    """All together, then two of them alone."""
    engine = start(folder, **{**_SMALL, **settings})
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    found = [*run(engine, requests, arrivals), *(run(engine, [requests[n]])[0] for n in (0, 3))]
    engine.close()
    for output, (tokens, logprobs) in zip(found, [*expected, expected[0], expected[3]], strict=True):
        assert output.token_ids == tokens
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(output.logprobs, logprobs, strict=True))
    return engine


def check_plain(folder: Path, expected: Expected) -> Engine:
    """The native kernels, in chunks of 7 tokens, with cached prefixes and so few blocks that requests are preempted; with
    room for all of them token by token, and in chunks that hold the longest prompt."""
    for chunk in (1, 64):
        check(folder, expected, max_batch_prefill_tokens=chunk)
    engine = check(folder, expected, max_batch_prefill_tokens=7, max_batch_total_tokens=80)
    stats = engine.loop.scheduler.stats
    # Windows of all requests fit into the same blocks: `test_windows` has fewer.
    assert (stats.num_preemptions > 0) == (engine.resolved.window is None)
    assert stats.num_cached_prompt_tokens > 0
    return engine


def check_captured(folder: Path, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Replayed steps, without cached prefixes."""
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    engine = check(folder, expected, _LATE, max_batch_prefill_tokens=33, prefix_caching=False)
    assert device.num_replays > 0
    return engine


def check_bucketed(folder: Path, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Padded passes of one phase, captured: prompts in parts of 24 tokens, after cached prefixes."""
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    shapes: dict[str, Any] = {"bucketing": True, "max_batch_prefill_tokens": 24, "custom_kernels": False}
    engine = check(folder, expected, _LATE, **shapes)
    stats = engine.rank.bucket_stats
    assert stats is not None and stats.num_unplanned == 0
    assert engine.loop.scheduler.stats.num_cached_prompt_tokens > 0
    return engine
