"""What the dashboard shows, as a stream of events: metrics once a second, requests as they end, errors as they come.

Nothing is looked at or kept while nobody listens. Listeners share what is made for them: one encoding a second,
however many there are. No text of anybody is in it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection
from heapq import nlargest

import msgspec

from text_generation_inference.api.engines import Engines
from text_generation_inference.api.generation import Generation
from text_generation_inference.api.http import frame
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.errors import OverloadedError

MAX_LISTENERS = 16
PERIOD_S = 1.0
# Histograms whose buckets are told, so that distributions can be drawn; of the others sum and count are.
DISTRIBUTIONS = (
    "tgi_time_to_first_token_duration",
    "tgi_inter_token_duration",
    "tgi_request_duration",
    "tgi_request_queue_duration",
)
_MOST_ENDED = 8  # requests that ended since the last event, the slowest
_MOST_RUNNING = 8  # requests that run, the oldest
_MOST_ERRORS = 20  # since the last event, the newest


class Timeline(msgspec.Struct, frozen=True):
    """Where the time of a request went, in seconds since its arrival."""

    route: str
    request_id: str  # as in the log and in the answer's header; empty while it runs
    total: float
    validated: float
    admitted: float | None  # None: it waits
    first_token: float | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    end: str = ""  # why it ended

    @staticmethod
    def of(generation: Generation, now: float, route: str = "", request_id: str = "") -> "Timeline":
        admitted_s = generation.admitted_s
        if generation.timings is not None:
            total = generation.timings.total_s
        else:
            total = now - generation.arrived
        return Timeline(
            route,
            request_id,
            round(total, 4),
            round(generation.submitted_s, 4),
            None if admitted_s is None else round(admitted_s, 4),
            None if generation.first_token_s is None else round(generation.first_token_s, 4),
            generation.input_length,
            generation.num_cached_tokens,
            generation.num_tokens,
            generation.finish_reason,
        )


class ErrorNote(msgspec.Struct, frozen=True):
    """A request that was refused or failed."""

    at: float  # seconds since 1970
    route: str
    request_id: str
    kind: str
    status: int


class EngineNote(msgspec.Struct, frozen=True):
    state: str
    device: str
    requests: int
    queued_tokens: int


class LiveStart(msgspec.Struct, frozen=True, tag="start", tag_field="type"):
    """The first event: what does not change."""

    model: str
    version: str
    ranks: int
    max_input_tokens: int
    max_total_tokens: int
    max_concurrent_requests: int
    bounds: list[float]  # of every distribution, seconds
    period_s: float


class LiveSample(msgspec.Struct, frozen=True, tag="sample", tag_field="type"):
    """Every second. Counters and counts are since the start: whoever wants a rate takes two of them."""

    at: float  # seconds since 1970
    numbers: dict[str, float]  # as in /metrics
    counts: dict[str, list[int]]  # of `DISTRIBUTIONS`, by bucket
    engines: list[EngineNote]
    ended: list[Timeline]
    running: list[Timeline]
    errors: list[ErrorNote]
    num_errors: int  # since the last event, of which `errors` are the newest


class Listener:
    """One of those who watch. It sees the newest event; those that it was too slow for are gone."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._came = asyncio.Event()

    def put(self, event: bytes | None) -> None:
        self._newest = event
        self._came.set()

    async def next(self) -> bytes | None:
        """None: there will be no more."""
        await self._came.wait()
        self._came.clear()
        return self._newest


class LiveFeed:
    def __init__(self, metrics: Metrics, engines: Engines, generations: Collection[Generation]) -> None:
        self._metrics, self._engines, self._generations = metrics, engines, generations
        self._listeners: set[Listener] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._ended: list[Timeline] = []
        self._errors: deque[ErrorNote] = deque(maxlen=_MOST_ERRORS)
        self._num_errors = 0

    @property
    def is_watched(self) -> bool:
        return bool(self._listeners)

    def join(self) -> Listener:
        """Whoever joins must `leave`. Raises `OverloadedError`."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise OverloadedError(f"The dashboard is open {MAX_LISTENERS} times already")
        listener = Listener()
        self._listeners.add(listener)
        listener.put(frame(self._sample()))
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
            self._forget()

    def close(self) -> None:
        for listener in self._listeners:
            listener.put(None)

    # -- what is told of requests ----------------------------------------------------------------------------------

    def end(self, generation: Generation, route: str, request_id: str) -> None:
        if self._listeners:
            self._ended.append(Timeline.of(generation, 0.0, route, request_id))
            if len(self._ended) > 4 * _MOST_ENDED:
                self._ended = _slowest(self._ended)

    def fail(self, route: str, request_id: str, kind: str, status: int) -> None:
        if self._listeners:
            self._num_errors += 1
            self._errors.append(ErrorNote(round(time.time(), 3), route, request_id, kind, status))

    # -- samples ---------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            event = frame(self._sample())
            self._forget()
            for listener in self._listeners:
                listener.put(event)

    def _forget(self) -> None:
        self._ended = []
        self._errors.clear()
        self._num_errors = 0

    def _sample(self) -> LiveSample:
        now = time.perf_counter()
        oldest = nlargest(_MOST_RUNNING, self._generations, key=lambda generation: now - generation.arrived)
        return LiveSample(
            round(time.time(), 3),
            self._metrics.numbers(),
            {name: self._metrics.counts(name) for name in DISTRIBUTIONS},
            [
                EngineNote(link.state, link.facts.device if link.facts else "", *self._engines.work_of(link))
                for link in self._engines.links
            ],
            _slowest(self._ended),
            [Timeline.of(generation, now) for generation in oldest if not generation.finished],
            list(self._errors),
            self._num_errors,
        )


def _slowest(ended: list[Timeline]) -> list[Timeline]:
    return nlargest(_MOST_ENDED, ended, key=lambda timeline: timeline.total)
