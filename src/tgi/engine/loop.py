"""The loop: plan step n+1 while the device runs step n, then take the result of step n.

Level 7. The loop without overlap is the same code that waits at once.
"""

from collections import deque
from concurrent.futures import Future, wait
from typing import Protocol

from tgi.errors import EngineError
from tgi.scheduler.scheduler import Scheduler
from tgi.types import GenerationRequest, StepPlan, StepResult, TokenOut


class StepRunner(Protocol):
    def launch(self, plan: StepPlan) -> "Future[StepResult]": ...


class EngineLoop:
    def __init__(self, scheduler: Scheduler, runner: StepRunner, overlap: bool = True) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._depth = 1 if overlap else 0  # steps in flight while the next one is planned
        self._pending: deque[Future[StepResult]] = deque()

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
            self._pending.append(self._runner.launch(plan))
        return bool(self._pending) and (plan is None or len(self._pending) > self._depth)

    def wait(self) -> None:
        """Until the oldest step is done. May be interrupted and called again."""
        wait([self._pending[0]])

    def take(self) -> TokenOut:
        """The tokens of the oldest step. Raises `EngineError` if it failed; nothing more can be computed then."""
        pending = self._pending.popleft()
        try:
            return self.scheduler.apply(pending.result())
        except Exception as error:
            raise EngineError(f"a step failed on the device: {error}") from error
