"""One run of a batch of equal requests from its start to its last token, timed.

The clock stands still while a display has its turn, and nothing is computed meanwhile: the step in flight is
waited for first. Only when a step takes so long that somebody at the keyboard would notice, a key or a new size of the
window is answered while it runs.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from text_generation_inference.bench.static.display import Display, Moment
from text_generation_inference.drive import run_requests
from text_generation_inference.engine.loop import EngineLoop
from text_generation_inference.errors import EngineError
from text_generation_inference.types import GenerationRequest, SamplingParams

_SECONDS_UNTIL_NOTICED = 0.1


class BatchRun(NamedTuple):
    prefill_seconds: float  # until every request has its first token
    decode_seconds: float  # from then on
    prefill_steps: int


class _Clock:
    """Time that passes for the measurement."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def read(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        stopped_at = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - stopped_at


def make_requests(
    prompt: list[int], count: int, decode_length: int, sampling: SamplingParams
) -> list[GenerationRequest]:
    """Copies of one request. Nothing ends them early."""
    return [
        GenerationRequest(
            id=number,
            token_ids=prompt,
            sampling=sampling,
            max_new_tokens=decode_length,
            stop_token_ids=[],
            seed=sampling.seed or 0,
        )
        for number in range(count)
    ]


def run_batch(loop: EngineLoop, requests: list[GenerationRequest], display: Display) -> BatchRun:
    """Raises `EngineError` if a request fails. However it ends, nothing of the batch stays in the engine."""
    without_token = {request.id for request in requests}
    num_tokens = num_prefill = 0
    prefill_seconds = last = 0.0
    clock = _Clock()

    def wait() -> None:
        """Until the oldest step in flight, if there is one, is done."""
        while not loop.wait(_SECONDS_UNTIL_NOTICED):
            if display.wants_turn(Moment.IN_A_STEP):
                display.take_turn()

    with closing(run_requests(loop, requests, lambda _: "a request of the batch", wait)) as steps:
        for out in steps:
            last = clock.read()
            num_tokens += len(out.token_ids)
            num_prefill += loop.last.prefill
            if without_token:
                without_token.difference_update(out.request_ids)
                prefill_seconds = last
            if loop.has_work and display.wants_turn(Moment.BETWEEN_STEPS):
                wait()
                with clock.stopped():
                    display.take_turn()
    expected = sum(request.max_new_tokens for request in requests)
    if num_tokens != expected:
        raise EngineError(f"a batch of {len(requests)} gave {num_tokens} tokens instead of {expected}")
    return BatchRun(prefill_seconds, last - prefill_seconds, num_prefill)
