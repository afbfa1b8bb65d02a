"""Every architecture of the registry equals `transformers` on every path that a pass can take, token for token."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start
from queue_on_cpu import QueueOnCpu
from ranks import PROMPT, logits_of_ranks

from text_generation_inference.engine.build import Engine
from text_generation_inference.models.registry import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 12
PROMPTS = random_prompts(320, [1, 5, 17, 40], seed=3)  # the last is longer than the windows of TINY
SMALL: dict[str, Any] = {"max_total_tokens": 64, "max_batch_size": 4}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family = request.param.removesuffix("ForCausalLM")
    return make_tiny(family, {}, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[tuple[list[int], list[float]]]:
    return [reference(tiny.model, prompt, NEW) for prompt in PROMPTS]


def check(tiny: Tiny, expected: list[tuple[list[int], list[float]]], **settings: Any) -> Engine:
    """All at once, in chunks where prompts may be cut, and each alone."""
    engine = start(tiny.folder, **{"max_batch_prefill_tokens": 33, **SMALL, **settings})
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    found = [*run(engine, requests, arrivals=[0, 0, 2, 3]), *(run(engine, [request])[0] for request in requests)]
    engine.close()
    for output, (tokens, logprobs) in zip(found, 2 * expected, strict=True):
        assert output.token_ids == tokens
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(output.logprobs, logprobs, strict=True))
    return engine


@pytest.mark.parametrize("custom_kernels", [False, True], ids=["torch", "native"])
def test_plain(tiny: Tiny, expected: list, custom_kernels: bool) -> None:
    check(tiny, expected, custom_kernels=custom_kernels)


def test_captured(tiny: Tiny, expected: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    check(tiny, expected)
    assert device.num_replays > 0


@pytest.mark.parametrize("captured", [False, True], ids=["at-once", "captured"])
def test_bucketed(tiny: Tiny, expected: list, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, Any] = {"bucketing": True, "max_batch_prefill_tokens": 64, "custom_kernels": False}
    if captured:
        device = QueueOnCpu(tmp_path)
        monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    assert check(tiny, expected, **shapes).rank.bucket_stats is not None


def test_two_ranks(tiny: Tiny) -> None:
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of_ranks(tiny.folder, 2), expected, atol=1e-4, rtol=1e-4)
