"""The feed of the dashboard, without a server: it works for those who listen and for nobody else."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from text_generation_inference.api.engines import Engines
from text_generation_inference.api.live import MAX_LISTENERS, LiveFeed
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.errors import OverloadedError


def make() -> tuple[Metrics, LiveFeed]:
    metrics = Metrics(100, 200)
    return metrics, LiveFeed(metrics, Engines(1, metrics), set())


def ended(total_s: float) -> Any:
    """As far as a feed reads a generation that has ended."""
    return SimpleNamespace(
        timings=SimpleNamespace(total_s=total_s),
        submitted_s=0.001,
        admitted_s=0.002,
        first_token_s=0.003,
        input_length=3,
        num_cached_tokens=0,
        num_tokens=4,
        finish_reason="length",
    )


def sample_of(event: bytes | None) -> Any:
    assert event is not None
    return json.loads(event.removeprefix(b"data: "))


def test_works_only_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("text_generation_inference.api.live.PERIOD_S", 0.01)
    metrics, feed = make()
    asked: list[int] = []
    numbers = metrics.numbers
    monkeypatch.setattr(metrics, "numbers", lambda: asked.append(1) or numbers())

    async def run() -> None:
        feed.end(ended(1.0), "/generate", "before")
        feed.fail("/generate", "before", "validation", 422)
        await asyncio.sleep(0.05)
        assert not asked and not feed.is_watched and len(asyncio.all_tasks()) == 1
        listener, other = feed.join(), feed.join()
        assert sample_of(await listener.next())["ended"] == []
        feed.end(ended(2.0), "/generate", "while")
        events = await listener.next(), await other.next(), await other.next()
        told = [request["request_id"] for event in events[:1] for request in sample_of(event)["ended"]]
        assert told == ["while"] and events[2] is not None
        feed.leave(other)
        assert feed.is_watched and await listener.next() is not None
        feed.leave(listener)
        await asyncio.sleep(0)
        number = len(asked)
        feed.end(ended(3.0), "/generate", "after")
        await asyncio.sleep(0.05)
        assert len(asked) == number and len(asyncio.all_tasks()) == 1
        late = feed.join()
        assert sample_of(await late.next())["ended"] == []
        feed.close()
        assert await late.next() is None
        feed.leave(late)

    asyncio.run(run())


def test_listeners_and_what_is_kept_for_them_are_bounded() -> None:
    _, feed = make()

    async def run() -> None:
        listeners = [feed.join() for _ in range(MAX_LISTENERS)]
        with pytest.raises(OverloadedError, match="open 16 times"):
            feed.join()
        for number in range(1000):
            feed.end(ended(float(number)), "/generate", str(number))
            feed.fail("/generate", str(number), "validation", 422)
        feed.leave(listeners.pop())
        listeners.append(feed.join())
        sample = sample_of(await listeners[-1].next())
        assert [request["request_id"] for request in sample["ended"]] == [str(999 - n) for n in range(8)]
        assert sample["num_errors"] == 1000 and [error["request_id"] for error in sample["errors"]] == [
            str(number) for number in range(980, 1000)
        ]
        for listener in listeners:
            feed.leave(listener)

    asyncio.run(run())
