"""Which phases a run has, and what they measure: sweep, rate and throughput, as in inference-benchmarker.

`Session` runs one phase; the modes are lists of phases, of which the sweep knows its rates only after it has
found the maximum.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from text_generation_inference.bench.serve import arrivals
from text_generation_inference.bench.serve.apis import ApiCall
from text_generation_inference.bench.serve.client_pool import ClientPool, LoadPlan, LoadProgress
from text_generation_inference.bench.serve.measure import summarise
from text_generation_inference.bench.serve.messages import EncodedRequest
from text_generation_inference.bench.serve.prompts import Prompt
from text_generation_inference.bench.serve.results import Phase
from text_generation_inference.bench.serve.target import Target
from text_generation_inference.errors import StartError

SWEEP_UP_TO = 1.2  # of the maximum: where a server has more to do than it can


class PromptSource(Protocol):
    def make(self) -> Prompt: ...


class Modes(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    mode: str  # "sweep", "rate" or "throughput"
    arrivals: str  # "constant" or "poisson"
    users: int
    seconds: float | None  # of a phase; None: until all requests are answered
    warmup_seconds: float  # 0: no warm-up
    rates: list[float]
    num_rates: int
    num_requests: int | None  # of each phase but the warm-up

    def num_phases(self) -> int:
        counts = {"sweep": 1 + self.num_rates, "rate": len(self.rates), "throughput": 1}
        return counts[self.mode] + (self.warmup_seconds > 0)

    def planned_seconds(self, rate: float | None) -> float | None:
        """How long the requests of a phase will be sent; None when that depends on the server."""
        if self.num_requests is None:
            return self.seconds
        return None if rate is None else self.num_requests / rate


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A phase to run."""

    name: str
    mode: str  # "throughput", "constant" or "poisson"
    users: int | None = None
    rate: float | None = None
    seconds: float | None = None
    num_requests: int | None = None


def steps_of(modes: Modes, last_phase: Callable[[], Phase | None]) -> Iterator[PhasePlan]:
    """`last_phase` is what the phase before has measured. Raises `StartError` if a sweep has found no maximum."""
    if modes.warmup_seconds:
        yield PhasePlan(name="warmup", mode="throughput", users=1, seconds=modes.warmup_seconds)
    rates = modes.rates
    if modes.mode != "rate":
        yield PhasePlan(
            name="throughput",
            mode="throughput",
            users=modes.users,
            seconds=modes.seconds,
            num_requests=modes.num_requests,
        )
    if modes.mode == "throughput":
        return
    if modes.mode == "sweep":
        found = last_phase()
        if found is None or found.qps <= 0:
            raise StartError("no request of the phase `throughput` succeeded, so there are no rates to sweep")
        highest = SWEEP_UP_TO * found.qps
        rates = [number * highest / modes.num_rates for number in range(1, modes.num_rates + 1)]
    for rate in rates:
        yield PhasePlan(
            name=f"{modes.arrivals}@{rate:.2f}req/s",
            mode=modes.arrivals,
            rate=rate,
            seconds=modes.seconds,
            num_requests=modes.num_requests,
        )


class Session:
    """Runs phases with one supply of prompts, so that no two requests of a run are alike."""

    def __init__(
        self,
        pool: ClientPool,
        target: Target,
        call: ApiCall,
        prompts: PromptSource,
        seed: int,
        limits_ms: dict[str, float],
        with_details: bool,
    ) -> None:
        self._pool, self._target, self._call, self._prompts = pool, target, call, prompts
        self._rng = random.Random(seed)
        self._limits_ms, self._with_details = limits_ms, with_details
        self._sent: dict[int, Prompt] = {}
        self._number = 0
        self.mismatch: tuple[int, int] | None = None  # of tokens in a prompt: ours, the server's
        self.num_short = 0  # answers that ended before the asked length

    def run(
        self, step: PhasePlan, tell: Callable[[LoadProgress], None], is_stopped: Callable[[], bool]
    ) -> tuple[Phase, bool]:
        """The phase, and whether it was ended early."""
        self._sent.clear()
        record = self._pool.run(self._plan(step), self._make_request, tell, is_stopped)
        for outcome in record.outcomes:
            prompt = self._sent[outcome.number]
            if self._call.api != "chat" and None not in (prompt.num_tokens, outcome.num_prompt):
                ours, theirs = prompt.num_tokens or 0, outcome.num_prompt or 0
                if ours != theirs and self.mismatch is None:
                    self.mismatch = ours, theirs
            if outcome.error is None and outcome.num_generated is not None:
                self.num_short += outcome.num_generated < prompt.max_new_tokens
        names: dict[str, Any] = {"name": step.name, "mode": step.mode, "users": step.users, "rate": step.rate}
        limits, details = self._limits_ms, self._with_details
        phase = summarise(record, self._sent, **names, limits_ms=limits, with_details=details)
        return phase, record.is_interrupted

    def _plan(self, step: PhasePlan) -> LoadPlan:
        if step.rate is None:
            return LoadPlan(users=step.users or 1, seconds=step.seconds, num_requests=step.num_requests)
        seconds = step.seconds or 0.0
        if step.mode == "poisson":
            due = arrivals.poisson(step.rate, seconds, self._rng, step.num_requests)
        else:
            due = arrivals.constant(step.rate, seconds, step.num_requests)
        return LoadPlan(due=due)

    def _make_request(self) -> EncodedRequest:
        prompt = self._prompts.make()
        number = self._number
        self._number += 1
        self._sent[number] = msgspec.structs.replace(prompt, content="")  # texts may be long
        return EncodedRequest(
            number, self._target.frame(self._call.api, self._call.body(prompt.content, prompt.max_new_tokens))
        )
