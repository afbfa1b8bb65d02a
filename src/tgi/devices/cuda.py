"""An NVIDIA GPU as a device.

Level 1. Work goes to one stream; the planning thread queues it and never waits. Results come back through pinned memory
with an event, which a thread of its own waits for.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tgi.devices.buckets import decode_sizes
from tgi.devices.device import Mark, Ops
from tgi.errors import StartError
from tgi.kernels.triton.ops import load_ops
from tgi.types import Limits

_MIN_CAPABILITY = (8, 0)  # bfloat16 in hardware
_MARGIN_BYTES = 1 << 30  # what the context, the libraries and captured steps take beside what torch counts


class CudaDevice:
    name = "cuda"
    comm_backend = "nccl"
    runs_ahead = True
    cache_by_head = True

    def __init__(self, custom_kernels: bool = True, memory_fraction: float = 1.0) -> None:
        _check_available()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        properties = _read_properties(self.torch_device)
        capability = (properties.major, properties.minor)
        bf16 = capability >= _MIN_CAPABILITY
        self.limits = Limits(
            block_size=16,
            dtypes=["bfloat16", "float16", "float32"] if bf16 else ["float16", "float32"],
            mixes_phases=True,
            pads=True,
            max_batch_size=1024,
            max_batch_prefill_tokens=8192,
            memory_share=1.0,
        )
        self._memory_fraction = memory_fraction
        faster = load_ops(properties.multi_processor_count) if custom_kernels else "custom kernels are off"
        if isinstance(faster, str):
            self.ops = Ops(f"torch ops, much slower than Triton kernels: {faster}")
        else:
            self.ops = Ops(f"Triton kernels on {properties.name}", **faster)
        self.stream = torch.cuda.Stream(self.torch_device)
        self._pool: Any = None  # memory that all captured steps share
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tgi-cuda")

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, free - int((1 - self._memory_fraction) * total) - _MARGIN_BYTES)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        return self._finisher.submit(work)

    def close(self) -> None:
        self._finisher.shutdown(wait=True)
        torch.cuda.synchronize(self.torch_device)

    # -- the queue -------------------------------------------------------------------------------------------------

    def scope(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def host_words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return _EventMark(event)

    def later(self, mark: Mark, finish: Callable[[], Any]) -> "Future[Any]":
        def wait_and_finish() -> Any:
            mark.wait()
            return finish()

        return self._finisher.submit(wait_and_finish)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with self.scope():
            work()  # compiles kernels and makes workspaces, which a capture may not
            self.stream.synchronize()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`, which collects garbage and empties caches each time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph.replay, result

    def decode_sizes(self, maximum: int) -> list[int]:
        return decode_sizes(maximum)


def _read_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)  # pyright: ignore


class _EventMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def _check_available() -> None:
    if torch.version.cuda is None:
        raise StartError(
            f"`device` cuda needs a PyTorch built for CUDA; {torch.__version__} is not. Install one, or use"
            " `device` cpu."
        )
    if not torch.cuda.is_available():
        raise StartError(
            f"`device` cuda: PyTorch (built for CUDA {torch.version.cuda}) finds no usable GPU. Is one there, and is"
            " its driver new enough (`nvidia-smi` says)? `device` cpu runs without one."
        )
