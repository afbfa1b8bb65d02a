"""Every architecture of the registry equals `transformers` on every path that a pass can take, token for token."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from driving import Tiny, family_of, make_request, make_tiny, random_prompts, reference, run, start
from queue_on_cpu import QueueOnCpu
from ranks import PROMPT, logits_of_threads

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine
from text_generation_inference.launch.check import check_model
from text_generation_inference.models.registry import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 20
LATE = [0, 0, 2, 3, 9]
SHARED = random_prompts(320, [40], seed=3)[0]  # longer than the windows of TINY, and two blocks that others can use
PROMPTS = [*random_prompts(320, [1, 5, 17], seed=3), SHARED, [*SHARED[:33], 7, 8]]
SMALL: dict[str, Any] = {"max_total_tokens": 64, "max_batch_size": 4}

# Architectures that `transformers` has, as they are and in the variants that their files name; those of a model inside
# another's config are tested once.
CASES: dict[str, tuple[str, dict]] = {}
for architecture in ARCHITECTURES:
    if hasattr(transformers, architecture):
        CASES[architecture] = (architecture, {})
        family = family_of(architecture)
        is_inside = architecture in getattr(family, "TINIES", {})
        for name, overrides in () if is_inside else getattr(family, "VARIANTS", {}).items():
            CASES[f"{architecture}-{name}"] = (architecture, overrides)


@pytest.fixture(scope="module", params=list(CASES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(*CASES[request.param], tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> list[tuple[list[int], list[float]]]:
    return [reference(tiny.model, prompt, NEW) for prompt in PROMPTS]


def check(
    folder: Path, expected: list[tuple[list[int], list[float]]], arrivals: list[int] | None = None, **settings: Any
) -> Engine:
    """All together, then two of them alone."""
    engine = start(folder, **{**SMALL, **settings})
    requests = [make_request(n, prompt, NEW) for n, prompt in enumerate(PROMPTS)]
    found = [*run(engine, requests, arrivals), *(run(engine, [requests[n]])[0] for n in (0, 3))]
    engine.close()
    for output, (tokens, logprobs) in zip(found, [*expected, expected[0], expected[3]], strict=True):
        assert output.token_ids == tokens
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(output.logprobs, logprobs, strict=True))
    return engine


def test_plain(tiny: Tiny, expected: list) -> None:
    """The native kernels, in chunks of 7 tokens, with cached prefixes and so few blocks that requests are preempted."""
    engine = check(tiny.folder, expected, max_batch_prefill_tokens=7, max_batch_total_tokens=80)
    stats = engine.loop.scheduler.stats
    # Windows of all requests fit into the same blocks: `test_windows` has fewer.
    assert (stats.num_preemptions > 0) == (engine.resolved.window is None)
    assert stats.num_cached_prompt_tokens > 0


def test_captured(tiny: Tiny, expected: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed steps, from a checkpoint in several files, without cached prefixes."""
    tiny.model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    check(tmp_path / "sharded", expected, LATE, max_batch_prefill_tokens=33, prefix_caching=False)
    assert device.num_replays > 0


def test_bucketed(tiny: Tiny, expected: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded passes of one phase, captured."""
    device = QueueOnCpu(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    shapes: dict[str, Any] = {"bucketing": True, "max_batch_prefill_tokens": 64, "custom_kernels": False}
    assert check(tiny.folder, expected, LATE, **shapes).rank.bucket_stats is not None


def test_two_ranks(tiny: Tiny) -> None:
    with torch.no_grad():
        expected = tiny.model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of_threads(tiny.folder, 2), expected, atol=1e-4, rtol=1e-4)


def test_check(tiny: Tiny) -> None:
    """`tgi check` counts what the model has, before anything of it is loaded."""
    report = check_model(ServerConfig(model_id=str(tiny.folder), device="cpu", dtype="float32"))
    assert report.is_supported
    assert report.problems == ["there is no tokenizer.json, so text cannot be turned into tokens"]
    saved, model = tiny.model.state_dict(), tiny.model
    tensors = (*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in saved))
    parameters = [(name, each.numel()) for name, each in tensors]
    others = ("vision_tower", "vision_model", "projector")
    counted = sum(size for name, size in parameters if not any(each in name for each in others))
    assert (report.parameters, report.weight_bytes) == (counted, 4 * counted)
    assert report.kv_bytes_per_token == 4 + sum(group.bytes_per_token for group in report.kv_layers)
    assert report.path is not None and report.path.startswith("models/") and report.lost == []
    assert (report.active_parameters is not None) == any(".experts" in name for name, _ in parameters)
