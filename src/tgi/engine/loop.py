"""The loop: plan step n+1 while the device runs step n, then take the result of step n.

Level 7. The loop without overlap is the same code that waits at once.
"""

import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol

from tgi.errors import EngineError
from tgi.scheduler.scheduler import Scheduler
from tgi.types import GenerationRequest, StepPlan, StepResult, TokenOut


class StepRunner(Protocol):
    def launch(self, plan: StepPlan) -> "Future[StepResult]": ...


@dataclass(slots=True)
class StepTimes:
    """What the last step taken was like."""

    prefill: bool = False
    num_admitted: int = 0
    joined: bool = False
    inference_ns: int = 0  # from planning to the result being there
    forward_ns: int = 0  # on the device, without waiting behind the step before
    decode_ns: int = 0  # taking the result


class _Step:
    """A step in flight."""

    __slots__ = ("done_ns", "future", "plan", "planned_ns")

    def __init__(self, plan: StepPlan, future: "Future[StepResult]") -> None:
        self.plan, self.future = plan, future
        self.planned_ns = self.done_ns = time.monotonic_ns()
        future.add_done_callback(self._stamp)

    def _stamp(self, _: object) -> None:
        self.done_ns = time.monotonic_ns()


class EngineLoop:
    def __init__(self, scheduler: Scheduler, runner: StepRunner, overlap: bool = True) -> None:
        self.scheduler = scheduler
        self.last = StepTimes()
        self._runner = runner
        self._depth = 1 if overlap else 0  # steps in flight while the next one is planned
        self._pending: deque[_Step] = deque()
        self._last_done_ns = 0

    def add(self, request: GenerationRequest) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: int) -> bool:
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> TokenOut | None:
        """Launch the next step, if any, and return the tokens of the oldest one once it is due."""
        if not self.launch():
            return None
        self.wait()
        return self.take()

    def launch(self) -> bool:
        """Plan and start the next step, if any. True if a result is due now."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._pending.append(_Step(plan, self._runner.launch(plan)))
        return bool(self._pending) and (plan is None or len(self._pending) > self._depth)

    def wait(self) -> None:
        """Until the oldest step is done. May be interrupted and called again."""
        wait([self._pending[0].future])

    def take(self) -> TokenOut:
        """The tokens of the oldest step. Raises `EngineError` if it failed; nothing more can be computed then."""
        step = self._pending.popleft()
        try:
            out = self.scheduler.apply(step.future.result())
        except Exception as error:
            raise EngineError(f"a step failed on the device: {error}") from error
        done_ns = step.done_ns
        self.last = StepTimes(
            bool(step.plan.chunks),
            len(step.plan.admit),
            bool(step.plan.admit) and step.plan.decode,
            done_ns - step.planned_ns,
            done_ns - max(step.planned_ns, self._last_done_ns),
            time.monotonic_ns() - done_ns,
        )
        self._last_done_ns = done_ns
        return out
