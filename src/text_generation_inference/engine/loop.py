"""The loop: plan step n+1 while the device runs step n, then take the result of step n.

The loop without overlap is the same code that waits at once. A step for which the device has no memory is
taken back together with what was planned after it, and its requests are planned again in smaller steps.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from text_generation_inference.devices.lack_of_memory import is_out_of_memory, known_words
from text_generation_inference.errors import EngineError
from text_generation_inference.failpoints import failpoint
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.types import GenerationRequest, StepPlan, StepResult, TokenOut


class StepRunner(Protocol):
    def launch(self, plan: StepPlan) -> "Future[StepResult]": ...


@dataclass(slots=True)
class StepTimes:
    """What the last step taken was like."""

    prefill: bool = False
    failed: bool = False  # then nothing more is said of it
    num_admitted: int = 0
    joined: bool = False
    inference_ns: int = 0  # from planning to the result being there
    forward_ns: int = 0  # on the device, without waiting behind the step before
    decode_ns: int = 0  # taking the result
    num_prompt_tokens: int = 0
    num_decoded: int = 0


class _DoneTime:
    """When a future was done. Apart from the step: a future keeps its callbacks, and a step that were one of them
    would stay, with its plan and its result, until a collection of cycles finds it."""

    __slots__ = ("ns",)

    def __init__(self, future: "Future[StepResult]") -> None:
        self.ns = time.monotonic_ns()
        future.add_done_callback(self._stamp)

    def _stamp(self, _: object) -> None:
        self.ns = time.monotonic_ns()


class _Step:
    """A step in flight."""

    __slots__ = ("_done", "future", "plan", "planned_ns")

    def __init__(self, plan: StepPlan, future: "Future[StepResult]", planned_ns: int) -> None:
        self.plan, self.future = plan, future
        self.planned_ns = planned_ns  # before it was launched: queuing a step may take longer than computing it
        self._done = _DoneTime(future)

    @property
    def done_ns(self) -> int:
        return self._done.ns

    @property
    def failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        overlap: bool = True,
        forget_slots: Callable[[], None] | None = None,  # makes the runner forget every request, for `rollback`
        wait_until_computing: Callable[[Future[Any], float | None], None] | None = None,  # see `Device`
    ) -> None:
        self.scheduler = scheduler
        self._forget_slots = forget_slots
        self._wait_until_computing = wait_until_computing
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
        if self._pending and self._pending[-1].failed:
            return True  # nothing can follow it
        failpoint("engine.plan")
        plan = self.scheduler.plan()
        if plan is not None:
            failpoint("engine.launch")
            planned_ns = time.monotonic_ns()
            self._pending.append(_Step(plan, self._runner.launch(plan), planned_ns))
        return bool(self._pending) and (plan is None or len(self._pending) > self._depth)

    def wait(self, seconds: float | None = None) -> bool:
        """Until the oldest step is done, or so long. True if it is, or if there is none. May be called again."""
        if not self._pending:
            return True
        if len(self._pending) > 1 and self._wait_until_computing is not None:
            self._wait_until_computing(self._pending[1].future, seconds)  # as a rule the oldest is done then
        return bool(wait([self._pending[0].future], seconds).done)

    def take(self) -> TokenOut:
        """The tokens of the oldest step. Raises `EngineError` if it failed; nothing more can be computed then."""
        taken_ns, step = time.monotonic_ns(), self._pending.popleft()
        try:
            result = step.future.result()
            failpoint("engine.apply")
            done_ns = step.done_ns
            forward_ns = done_ns - max(step.planned_ns, self._last_done_ns)
            out = self.scheduler.apply(result, forward_ns / 1e9)
        except Exception as error:
            self.last = StepTimes(bool(step.plan.chunks), failed=True)
            if self._forget_slots is not None and is_out_of_memory(error):
                return self._rollback(self._forget_slots, error)
            raise EngineError(f"a step failed on the device: {_summary(error)}") from error
        self.last = StepTimes(
            bool(step.plan.chunks),
            False,
            len(step.plan.admit),
            bool(step.plan.admit) and step.plan.decode,
            done_ns - step.planned_ns,
            forward_ns,
            time.monotonic_ns() - max(taken_ns, done_ns),
            sum(chunk.end - chunk.start for chunk in step.plan.chunks),
            len(result.token_ids) - sum(chunk.samples for chunk in step.plan.chunks),
        )
        self._last_done_ns = done_ns
        return out

    def _rollback(self, forget_slots: Callable[[], None], error: BaseException) -> TokenOut:
        """Take the oldest step back, and those behind it, whose results mean nothing without it."""
        wait([step.future for step in self._pending])
        broken = [other for step in self._pending if (other := step.future.exception()) and not is_out_of_memory(other)]
        if broken:
            raise EngineError(f"a step failed on the device: {_summary(broken[0])}") from broken[0]
        self._pending.clear()
        traceback.clear_frames(error.__traceback__)  # its variables hold tensors
        try:
            forget_slots()
        except Exception as failure:
            raise EngineError(f"the device did not recover from a lack of memory: {_summary(failure)}") from failure
        words = known_words(error)
        return self.scheduler.rollback(
            "not enough memory on the device for this request alone" + (f": {words}" if words else "")
        )


def _summary(error: BaseException) -> str:
    """What happened, without the lines of advice that torch adds."""
    return str(error).split("\n")[0] or type(error).__name__
