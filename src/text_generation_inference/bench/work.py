"""Rows of work: so many prompts of one length, so many tokens each. Drives an engine through them and measures.

Prompts are random tokens, all there at the start; greedy; nothing ends early. Knows the engine's loop and no
device.
"""

import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing

import msgspec

from text_generation_inference.bench.results import Row, RowResult
from text_generation_inference.drive import run_requests
from text_generation_inference.engine.build import Engine
from text_generation_inference.errors import EngineError
from text_generation_inference.types import GenerationRequest, SamplingParams

_FIRST_TOKEN = 5  # smaller ids are often special
_SECONDS_BETWEEN_WORDS = 0.25

Tell = Callable[[int], None]  # gets the number of tokens so far


def make_requests(row: Row, vocab_size: int, seed: int) -> list[GenerationRequest]:
    """The same seed gives the same prompts; different seeds share none."""
    rng = random.Random(seed)
    first = min(_FIRST_TOKEN, vocab_size - 1)
    return [
        GenerationRequest(
            id=(seed << 32) + number,
            token_ids=rng.choices(range(first, vocab_size), k=row.inputs),
            sampling=SamplingParams(),
            max_new_tokens=row.outputs,
            stop_token_ids=[],
            seed=0,
        )
        for number in range(row.requests)
    ]


class StepTime(msgspec.Struct):
    """One step as the host sees it."""

    seconds: float  # since the result before
    host_seconds: float
    rows: int


class Iteration(msgspec.Struct):
    """A row once through the engine."""

    seconds: float = 0.0
    firsts: list[float] = []  # seconds to the first token of each request
    decode: list[StepTime] = []  # steps without prompt tokens
    num_tokens: int = 0
    num_steps: int = 0
    num_prefill: int = 0
    num_preemptions: int = 0


def warm_up(engine: Engine, row: Row, seed: int) -> None:
    """A short piece of the row: what happens once, such as compiling a kernel for its sizes, is not measured."""
    small = Row(row.inputs, min(8, row.outputs), min(32, row.requests))
    run_once(engine, small, seed)


def run_once(engine: Engine, row: Row, seed: int, tell: Tell = lambda _: None) -> Iteration:
    """Raises `EngineError` if a request fails. After Ctrl-C nothing of the row stays in the engine."""
    requests = make_requests(row, engine.facts.vocab_size, seed)
    loop = engine.loop
    stats = loop.scheduler.stats
    found = Iteration(num_preemptions=-stats.num_preemptions)
    waiting = {request.id for request in requests}
    launched = waited = 0.0

    def wait() -> None:
        nonlocal launched, waited
        launched = time.perf_counter()
        loop.wait()
        waited = time.perf_counter()

    start = last = resumed = time.perf_counter()
    next_word = start + _SECONDS_BETWEEN_WORDS
    with closing(run_requests(loop, requests, lambda _: f"a request of row {row}", wait)) as steps:
        for out in steps:
            now = time.perf_counter()
            found.num_steps += 1
            found.num_tokens += len(out.token_ids)
            if waiting:
                came = waiting.intersection(out.request_ids)
                found.firsts += [now - start] * len(came)
                waiting -= came
            if loop.last.prefill:
                found.num_prefill += 1
            else:
                found.decode.append(StepTime(now - last, launched - resumed + now - waited, len(out.token_ids)))
            last = now
            if now > next_word:
                tell(found.num_tokens)
                next_word = now + _SECONDS_BETWEEN_WORDS
            resumed = time.perf_counter()
    found.seconds = last - start
    found.num_preemptions += stats.num_preemptions
    if found.num_tokens != row.outputs * row.requests:
        raise EngineError(f"row {row} gave {found.num_tokens} tokens instead of {row.outputs * row.requests}")
    return found


def summarise(row: Row, iterations: list[Iteration]) -> RowResult:
    """Throughput is iterations x requests x outputs / the seconds of all of them."""
    seconds = sum(one.seconds for one in iterations)
    num_tokens = sum(one.num_tokens for one in iterations)
    firsts = [first for one in iterations for first in one.firsts]
    decode = [step for one in iterations for step in one.decode]
    most = max((step.rows for step in decode), default=0)
    full = [step for step in decode if step.rows == most]
    return RowResult(
        inputs=row.inputs,
        outputs=row.outputs,
        requests=row.requests,
        iterations=len(iterations),
        seconds=round(seconds, 6),
        iteration_seconds=[round(one.seconds, 6) for one in iterations],
        output_tokens_per_s=round(num_tokens / seconds, 2),
        total_tokens_per_s=round((num_tokens + len(iterations) * row.inputs * row.requests) / seconds, 2),
        step_ms=_median_ms([step.seconds for step in full]),
        step_rows=most,
        host_ms=_median_ms([step.host_seconds for step in full]),
        first_token_ms=_median_ms(firsts),
        first_token_max_ms=round(1e3 * max(firsts), 4) if firsts else None,
        num_steps=sum(one.num_steps for one in iterations),
        num_prefill_steps=sum(one.num_prefill for one in iterations),
        num_preemptions=sum(one.num_preemptions for one in iterations),
    )


def _median_ms(seconds: list[float]) -> float | None:
    return round(1e3 * statistics.median(seconds), 4) if seconds else None
