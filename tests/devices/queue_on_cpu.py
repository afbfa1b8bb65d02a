"""The CPU in the role of a device that runs ahead, so that its runner can be tested anywhere."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.devices.device import GraphForward, failed_step
from text_generation_inference.devices.graphs import CapturedForward
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.ops import Ops


class QueueOnCpu(CpuDevice):
    def __init__(self, cache_dir: Path, ops: Ops | None = None) -> None:
        super().__init__(cache_dir, custom_kernels=False)
        most = 128 if ops is None else 48  # the CPU, and even more an interpreter, would take long over more
        self.limits = msgspec.structs.replace(
            self.limits, runs_ahead=True, graphs=True, captures_steps=True, max_captured_tokens=most
        )
        self.ops = ops or Ops()
        self.num_replays = 0
        self.is_replaying = False
        self.in_stream = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.in_stream += 1
        try:
            yield
        finally:
            self.in_stream -= 1

    def pinned_int32(self, count: int) -> Tensor:
        return torch.full((count,), -7, dtype=torch.int32)

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        try:
            with self.stream():
                finish = queue()
        except Exception as error:
            return failed_step(error)
        return self.submit(finish)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with self.stream():
            result = work()

        def replay() -> None:
            self.num_replays += 1
            self.is_replaying = True
            try:
                work()
            finally:
                self.is_replaying = False

        return replay, result

    def wrap_graphs(
        self, forward: Callable[[Batch], Tensor], first: Callable[[Batch], object] | None = None
    ) -> GraphForward:
        return CapturedForward(self, forward, first)
