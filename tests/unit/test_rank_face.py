"""An engine over a rank that has nothing but its face: no model, no runner, no device."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from text_generation_inference.config import ModelSize, ServerConfig
from text_generation_inference.engine import build
from text_generation_inference.engine.rank import RankFacts, RankGraphs, RankMemory
from text_generation_inference.types import GenerationRequest, Limits, SamplingParams, StepPlan, StepResult
from text_generation_inference.weights.source import ModelFolder

KV_BYTES, BLOCK = 100, 16
LIMITS = Limits(block_size=BLOCK, dtypes=["float32"], max_batch_size=4, max_batch_prefill_tokens=64, memory_share=1.0)


class FaceOnly:
    """The next token is the step's number. Notes in which order it is asked, and with which cache."""

    num_misfits = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked: list[str] = []
        self.num_blocks: list[int] = []
        self.decode: list[int] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("asked", "num_blocks", "decode", "num_misfits"):
            self.asked.append(name)
        return super().__getattribute__(name)

    def load(self, *_: Any) -> RankFacts:
        size = ModelSize(max_positions=128, kv_bytes_per_token=KV_BYTES)
        return RankFacts("nothing", LIMITS, "float32", 320, size, False, True, ["a rank without a model"])

    def measure(self) -> RankMemory:
        return RankMemory(free_bytes=70_000, step_bytes=20_000)

    def allocate(self, resolved: Any, *_: Any) -> None:
        self.num_blocks.append(resolved.num_blocks)

    def warm(self) -> RankGraphs:
        return RankGraphs(num_captured=0, num_lacking=0)

    def fits(self) -> bool:
        return len(self.num_blocks) > self.num_misfits

    def release(self) -> RankMemory:
        return RankMemory(free_bytes=65_000, step_bytes=20_000)

    def record(self) -> None:
        return None

    bucket_stats = None

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        self.decode = [slot for slot in self.decode if slot not in plan.leave] + plan.join
        rows = (len(self.decode) if plan.decode else 0) + sum(chunk.samples for chunk in plan.chunks)
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step, [plan.step] * rows, [0.0] * rows, [], [], []))
        return future

    def wait_until_computing(self, step: "Future[StepResult]", seconds: float | None = None) -> None:
        pass

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_model", lambda *_, **__: ModelFolder(model_id="m", path=Path("/m"), note=""))
    monkeypatch.setattr(build, "read_config", lambda _: None)
    monkeypatch.setattr(build, "read_quantization", lambda _: None)
    monkeypatch.setattr(build, "open_rank", FaceOnly)


def test_an_engine_asks_its_rank_for_nothing_else() -> None:
    engine = build.start_engine(ServerConfig(model_id="m"))
    rank: Any = engine.rank
    order = [name for name in rank.asked if name in ("load", "measure", "allocate", "warm", "fits", "launch")]
    assert order == ["load", "measure", "allocate", "warm", "fits"]
    assert engine.facts.notes[0] == "a rank without a model" and engine.facts.vocab_size == 320
    engine.loop.add(
        GenerationRequest(
            id=1, token_ids=[1] * 100, sampling=SamplingParams(), max_new_tokens=5, stop_token_ids=[], seed=0
        )
    )
    found: list[int] = []
    while engine.loop.has_work:
        out = engine.loop.step()
        found += out.token_ids if out is not None else []
    assert found == [2, 3, 4, 5, 6]  # the prompt takes two steps
    engine.close()


def test_memory_is_decided_by_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured, then what is free once the cache is given back, less what was found missing."""
    monkeypatch.setattr(FaceOnly, "num_misfits", 2)
    monkeypatch.setattr(build, "SPARE_BYTES", 10_000)
    monkeypatch.setattr(build, "MOST_SPARE_BYTES", 40_000)
    engine = build.start_engine(ServerConfig(model_id="m"))
    rank: Any = engine.rank
    per_block = KV_BYTES * BLOCK
    assert rank.num_blocks == [1 + left // per_block for left in (50_000, 35_000, 25_000)]
    assert engine.facts.num_blocks == rank.num_blocks[-1]
    assert any("less for the KV cache" in note for note in engine.notes)
