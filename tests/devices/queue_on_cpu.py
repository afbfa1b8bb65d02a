"""The CPU in the roles of devices that run ahead, so that their runners can be tested anywhere."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.devices.device import STEPS, GraphForward, T, failed_step
from text_generation_inference.devices.graphs import CapturedForward
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.ops import Ops

aten = torch.ops.aten
_FROM_HOST = (aten.lift_fresh.default, aten._local_scalar_dense.default, aten.nonzero.default)


class Recording(TorchDispatchMode):
    """The ops of a work, which can be done again on the very tensors that they had, as a graph does it."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _FROM_HOST, (
            f"{func} is not captured: the device would wait for the host, or it for the device"
        )
        out = func(*args, **(kwargs or {}))
        self._ops.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._ops:
            for own, made in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if made.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():  # else it is a view
                    own.copy_(made)


def _tensors(out: Any) -> list[Tensor]:
    return [each for each in (out if isinstance(out, tuple | list) else [out]) if isinstance(each, Tensor)]


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

    def capture(self, work: Callable[[], T], pool: str = STEPS) -> tuple[Callable[[], None], T]:
        """What is no step is recorded op by op. Steps in plain torch look at values on the host, which nothing that is
        recorded may: they are computed again."""
        recording = None if pool == STEPS else Recording()
        with self.stream(), recording or nullcontext():
            result = work()

        def replay() -> None:
            self.num_replays += 1
            self.is_replaying = True
            try:
                work() if recording is None else recording.replay()
            finally:
                self.is_replaying = False

        return replay, result

    def wrap_graphs(
        self, forward: Callable[[Batch], Tensor], first: Callable[[Batch], object] | None = None
    ) -> GraphForward:
        return CapturedForward(self, forward, first)


class KeepsTokensOnCpu(CpuDevice):
    """Slots are on the host; sampled tokens arrive there when a step is read, on another thread than that of steps."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir, custom_kernels=False)
        self.limits = msgspec.structs.replace(self.limits, keeps_tokens=True)
        self._reader = ThreadPoolExecutor(max_workers=1)
        self._coming: list[tuple[Tensor, Tensor]] = []

    def fetch(self, found: Tensor) -> Tensor:
        there = torch.full_like(found, -7)
        self._coming.append((there, found.clone()))
        return there

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        def begin() -> tuple[Callable[[], Any], list[tuple[Tensor, Tensor]]]:
            finish = queue()
            coming, self._coming = self._coming, []
            return finish, coming

        begun = self.submit(begin)

        def end() -> Any:
            finish, coming = begun.result()
            with torch.inference_mode():
                for there, found in coming:
                    there.copy_(found)
            return finish()

        return self._reader.submit(end)

    def close(self) -> None:
        super().close()
        self._reader.shutdown(wait=True)
