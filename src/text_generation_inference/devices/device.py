"""What the engine asks of a device, and which one to use.

A device is one file beside this one. Everything above works with `Device` and `Ops` and never hears a device's
name.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.driver import read_driver
from text_generation_inference.errors import StartError
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.parallel.collectives import Collectives, Meeting
from text_generation_inference.types import ALONE, DeviceMemory, Limits, Place

T = TypeVar("T")
STEPS = "steps"  # the memory that captured steps share


def failed_step(error: Exception) -> "Future[Any]":
    """What `Device.launch` returns where queueing raised. Made here: a variable of `launch`, which is in the error's
    traceback, would keep the error, and with it the tensors of the step, until a collection of cycles."""
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


class Event(Protocol):
    """A place in the queue of a device."""

    def wait(self) -> None:
        """Until everything before it is done."""
        ...


class GraphForward(Protocol):
    """A padded pass, captured when its shapes are first seen and replayed afterwards where the device has graphs."""

    @property
    def num_captured(self) -> int: ...

    def __call__(self, batch: Batch, bypass: bool = False) -> Tensor:
        """The result is good until the next call. `bypass`: without a graph."""
        ...


class Device(Protocol):
    """One device. What it can do is said by its `limits`; a device that does work at once is a queue that is done."""

    name: str
    description: str  # for messages
    torch_device: torch.device
    limits: Limits
    comm_backend: str
    cache_by_head: bool  # the tokens of a block lie together for each head, rather than the heads for each token
    holds_fp8: bool  # caches in FP8 are allocated as that, rather than as bytes seen as numbers
    fp8_max: float
    fp8_needs: str  # what computes in FP8, where this device does not

    @property
    def ops(self) -> Ops: ...

    @property
    def supports_fp8(self) -> bool: ...

    # -- memory ----------------------------------------------------------------------------------------------------

    def loading(self) -> AbstractContextManager[Callable[[], AbstractContextManager[Any]] | None]:
        """Around loading. A device with memory in pools yields a pool of its own for what loading gives back."""
        ...

    @property
    def settle(self) -> Callable[[], None] | None:
        """Called while loading, after each matrix: until the device has what was sent to it. None: it has."""
        ...

    def free_bytes(self) -> int:
        """Memory that a KV cache could take now. Gives back first what an allocator keeps for later."""
        ...

    def all_free_bytes(self) -> int:
        """With `runtime_bytes`."""
        ...

    @property
    def runtime_bytes(self) -> int:
        """Memory kept for passes without a graph; graphs and the cache leave it alone."""
        ...

    def memory(self) -> DeviceMemory:
        """What is in use now, by whomever, and what there is; nothing is given back and nothing waited for."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most memory that work held at a time, beside what was held before; 0 where that cannot be told."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A large long-lived buffer."""
        ...

    # -- work ------------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch) -> Batch:
        """The batch in the form that this device's ops read. Part of a captured pass."""
        ...

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run work in order after what was submitted before, without waiting for it."""
        ...

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        """Compute a step: `queue` queues its work and returns what reads the results once they are there.

        In the order of launching, without waiting for the step. The future has what was read, or what was raised.
        """
        ...

    def wait_until_computing(self, step: "Future[Any]", seconds: float | None = None) -> None:
        """Until a launched step leaves Python to others, where steps are prepared in a thread beside whoever plans.

        A few milliseconds at most.
        """
        ...

    def stream(self) -> AbstractContextManager[Any]:
        """Inside, torch ops go to this device's queue."""
        ...

    def pinned_int32(self, count: int) -> Tensor:
        """int32 on the host that the queue copies from and to by itself."""
        ...

    def send(self, host: Tensor) -> Tensor:
        """A copy on the device of what is on the host: queued, where that need not wait for the queue."""
        ...

    def event(self) -> Event: ...

    def fetch(self, found: Tensor) -> Tensor:
        """Queue a copy to the host, which has it once the step is done."""
        ...

    def timed(self, work: Callable[[], object]) -> Callable[[], float]:
        """Queue work; the seconds that it took can be asked for once it is done."""
        ...

    # -- graphs ----------------------------------------------------------------------------------------------------

    def capture(self, work: Callable[[], T], pool: str = STEPS) -> tuple[Callable[[], None], T]:
        """Record what `work` queues: (how to queue all of it again, its result). Where steps are captured.

        Captures of a pool share memory: what one leaves is good until another is replayed. A result that stays
        allocated costs memory of its own, so `work` had better return a long-lived buffer.
        """
        ...

    def forget_captures(self, pool: str | None = None) -> None:
        """Nobody has a capture of this pool, or of any, any more: those to come share no memory with earlier ones."""
        ...

    def wrap_graphs(
        self, forward: Callable[[Batch], Tensor], first: Callable[[Batch], object] | None = None
    ) -> GraphForward:
        """`first` is the same pass through fewer layers; it loads what a capture must find loaded."""
        ...

    def begin_compiling(self, work: Callable[[], object]) -> None:
        """Begin to compile what `work` would launch, while weights are loaded; `compiling` waits for it."""
        ...

    def compiling(self) -> AbstractContextManager[Any]:
        """Inside, steps only compile their kernels and compute nothing; afterwards all those are ready."""
        ...

    # -- ranks -----------------------------------------------------------------------------------------------------

    def join_ranks(self, meeting: Meeting) -> Collectives:
        """Sums and gathers with the devices of other ranks. Once, before anything is loaded."""
        ...

    def close(self) -> None: ...


def check_present(config: ServerConfig) -> None:
    """Raise `StartError` with the way out where a GPU is asked for and there is none: before anything is fetched."""
    if config.device == "cuda":
        from text_generation_inference.devices.cuda import explain_missing

        explain_missing(torch.__version__, torch.version.cuda, read_driver(), config.custom_kernels)


def choose_device(
    name: str,
    cache_dir: Path,
    custom_kernels: bool,
    num_threads: int | None,
    memory_fraction: float = 1.0,
    config: ServerConfig | None = None,  # for a device with settings of its own
    place: Place = ALONE,
) -> Device:
    """The device asked for; "auto" takes the fastest one present. A rank gets the one of its number."""
    from text_generation_inference.devices import hpu
    from text_generation_inference.devices.cpu import CpuDevice  # a device's libraries load only when it is chosen

    known: Sequence[str] = ("auto", "cpu", "cuda", "hpu")
    if name not in known:
        raise StartError(f"`device` must be one of {', '.join(known)}. Given: {name}")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        from text_generation_inference.devices.cuda import CudaDevice

        return CudaDevice(custom_kernels, memory_fraction, cache_dir, config.attention if config else None, place)
    settings = hpu.HpuSettings.of(config or ServerConfig())
    if name == "hpu" or (name == "auto" and hpu.is_present(settings.lazy)):
        return hpu.HpuDevice(settings, custom_kernels, place)
    num_sharing = place.local_world * (config.num_replicas if config else 1)
    device = CpuDevice(cache_dir, custom_kernels, num_threads, num_sharing)
    if name == "auto" and (gpus := read_driver().gpus):
        device.ops.description += f". {gpus[0].name} is not used: `device` cuda says why"
    return device
