"""What devices have in common that compute when they are told: steps run on one worker thread, so that planning
overlaps with computing. To whoever queues work, a queue that is always done.

Of two threads only one runs Python at a time. So that planning does not hold up a step that is being prepared, whoever
plans can wait until that step is in a call that leaves Python to others for long.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Event as ThreadEvent
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.devices.device import STEPS, Event, GraphForward, T
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.parallel.collectives import Collectives, Meeting

MOST_SECONDS = 0.005  # for which whoever plans waits for a step: several times what preparing one takes


class _Done:
    def wait(self) -> None:
        pass


class PlainForward:
    """A padded pass on a device without graphs."""

    num_captured = 0

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        self._forward = forward

    def __call__(self, batch: Batch, bypass: bool = False) -> Tensor:
        return self._forward(batch)


class AtOnce:
    """The part of `Device` that is about the queue, captures and ranks."""

    comm_backend: str
    torch_device: torch.device
    settle: Callable[[], None] | None = None
    tells_computing = False  # its ops call `note_computing`

    def __init__(self, thread_name: str) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._computing: dict[Future[Any], ThreadEvent] = {}  # of steps that are not done
        self._current: ThreadEvent | None = None

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        return self._worker.submit(work)

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        computing = ThreadEvent()
        step = self._worker.submit(self._run, queue, computing)
        self._computing[step] = computing
        step.add_done_callback(self._computing.pop)
        return step

    def _run(self, queue: Callable[[], Callable[[], Any]], computing: ThreadEvent) -> Any:
        self._current = computing if self.tells_computing else None
        if self._current is None:
            computing.set()
        try:
            return queue()()
        finally:
            computing.set()

    def note_computing(self) -> None:
        """Called where a step begins to compute outside of Python."""
        current, self._current = self._current, None
        if current is not None:
            current.set()

    def wait_until_computing(self, step: "Future[Any]", seconds: float | None = None) -> None:
        computing = self._computing.get(step)
        if computing is not None:
            computing.wait(MOST_SECONDS if seconds is None else min(seconds, MOST_SECONDS))

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def pinned_int32(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def send(self, host: Tensor) -> Tensor:
        return host.to(self.torch_device)

    def event(self) -> Event:
        return _Done()

    def fetch(self, found: Tensor) -> Tensor:
        return found.to("cpu", copy=True)

    def timed(self, work: Callable[[], object]) -> Callable[[], float]:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        return lambda: seconds

    def capture(self, work: Callable[[], T], pool: str = STEPS) -> tuple[Callable[[], None], T]:
        raise NotImplementedError("steps are not captured here")

    def forget_captures(self, pool: str | None = None) -> None:
        pass

    def wrap_graphs(
        self, forward: Callable[[Batch], Tensor], first: Callable[[Batch], object] | None = None
    ) -> GraphForward:
        return PlainForward(forward)

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_compiling(self, work: Callable[[], object]) -> None:
        pass

    def compiling(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def join_ranks(self, meeting: Meeting) -> Collectives:
        return meeting.connect(self.comm_backend)

    def close(self) -> None:
        self._worker.shutdown(wait=True)
