"""An NVIDIA GPU as a device.

Work goes to one stream; the planning thread queues it and never waits. Results come back through pinned memory
with an event, which a thread of its own waits for.
"""

import gc
import hashlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.config import may_share_cards
from text_generation_inference.devices import cuda_ranks
from text_generation_inference.devices.device import STEPS, Event, GraphForward, T, failed_step
from text_generation_inference.devices.driver import Driver, read_driver
from text_generation_inference.devices.graphs import CapturedForward
from text_generation_inference.errors import StartError
from text_generation_inference.kernels import flashinfer_prompts
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import as_paged, is_padded
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.triton import compile_workers
from text_generation_inference.kernels.triton.compile_workers import Workers
from text_generation_inference.kernels.triton.ops import load_ops
from text_generation_inference.parallel.collectives import Collectives, Meeting
from text_generation_inference.types import ALONE, DeviceMemory, Limits, Place

_MIN_TORCH = (2, 11)
_MIN_CAPABILITY, _BFLOAT16, _FP8, _WGMMA = (7, 5), (8, 0), (8, 9), (9, 0)
_MARGIN_BYTES = 1 << 30  # what captured steps take beside what torch counts, and what holes between tensors waste
_COMPILE_THREADS = 16
_READY_COMPILERS = 4  # for the kernels that take longest, which are asked for first
_MUCH_MEMORY = 64 << 30  # beside which what a large step takes is little
_MOST_CAPTURED_TOKENS = 2048
_MANY_CORES = 4  # so many compile faster in processes than in threads


class CudaDevice:
    name = "cuda"
    cache_by_head = True
    holds_fp8 = False
    fp8_max = 448.0
    fp8_needs = "a GPU of compute capability 8.9 or later (Ada, Hopper or newer)"
    runtime_bytes = 0

    def __init__(
        self,
        custom_kernels: bool = True,
        memory_fraction: float = 1.0,
        cache_dir: Path | None = None,
        attention: str | None = None,
        place: Place = ALONE,
    ) -> None:
        explain_missing(torch.__version__, torch.version.cuda, read_driver(), custom_kernels)
        compiled = None
        if cache_dir is not None:  # before Triton is imported
            compiled = Path(os.environ.setdefault("TRITON_CACHE_DIR", str(_folder_of_kernels(cache_dir))))
        compiles = custom_kernels and place.local_rank == 0  # other ranks find what this one leaves on disk
        self._compilers = _start_compilers(compiled) if compiles else None
        self._turns: cuda_ranks.CompileTurns | None = None
        if not torch.cuda.is_available():
            raise StartError(
                f"`device` cuda: PyTorch {torch.__version__} cannot use the GPU that the driver shows. `nvidia-smi` may"
                " say why; `device` cpu runs without one."
            )
        index, self._num_sharing = choose_card(place, torch.cuda.device_count(), may_share_cards())
        if index is not None:
            torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.comm_backend = "gloo" if self._num_sharing > 1 else "nccl"  # NCCL wants a card for each rank
        properties = _read_properties(self.torch_device)
        self.capability = (properties.major, properties.minor)
        self.description = f"{properties.name} (capability {properties.major}.{properties.minor})"
        self._memory_fraction = memory_fraction
        if memory_fraction < 1:
            torch.cuda.set_per_process_memory_fraction(memory_fraction, self.torch_device)  # pyright: ignore
        own_memory = properties.total_memory * memory_fraction / self._num_sharing
        flashinfer = attention == "flashinfer" and flashinfer_prompts.is_installed()
        loaded = "custom kernels are off"
        if custom_kernels:
            kinds = "Triton kernels, flashinfer for prompts," if flashinfer else "Triton kernels"
            loaded = load_ops(properties.multi_processor_count, f"{kinds} on {properties.name}", flashinfer)
        self._has_kernels = isinstance(loaded, Ops)
        self.limits = Limits(
            block_size=16,
            dtypes=["bfloat16", "float16", "float32"] if self.capability >= _BFLOAT16 else ["float16", "float32"],
            runs_ahead=True,
            graphs=True,
            captures_steps=True,
            max_captured_tokens=_MOST_CAPTURED_TOKENS if self._has_kernels else 0,  # nothing is captured without them
            measures_steps=True,
            meters_memory=True,
            max_batch_size=1024,
            max_batch_prefill_tokens=16384 if own_memory >= _MUCH_MEMORY else 8192,
            memory_share=1.0,
            step_timeout_s=300.0,  # a kernel may have to be compiled
        )
        if isinstance(loaded, str):
            loaded = Ops(f"torch ops, much slower than Triton kernels: {loaded}", low_bit_ops=frozenset())
        self.ops = loaded
        self._queue = torch.cuda.Stream(self.torch_device)
        self._idle_events: list[torch.cuda.Event] = []  # of steps that are done
        self._pools: dict[str, Any] = {}  # memory that captures share, by name
        self._num_captured: Counter[str] = Counter()  # into each
        self._finisher = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="tgi-cuda",
            initializer=torch.cuda.set_device,  # of each thread its own
            initargs=(self.torch_device,),
        )

    @property
    def supports_fp8(self) -> bool:
        return self.capability >= _FP8

    settle = None

    @contextmanager
    def loading(self) -> Generator[Callable[[], AbstractContextManager[Any]], None, None]:
        """Afterwards all that torch holds is in tensors, and what steps take comes from segments that grow: steps of
        many sizes leave no holes in them that only smaller ones could use."""
        _grow_segments(False)
        pools = [torch.cuda.MemPool()]
        try:
            yield lambda: torch.cuda.use_mem_pool(pools[0], self.torch_device)
        finally:
            torch.cuda.synchronize(self.torch_device)
            pools.clear()  # the last reference: its memory is given back
            torch.cuda.empty_cache()
            _grow_segments(True)

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(0, (free - int((1 - self._memory_fraction) * total)) // self._num_sharing - _MARGIN_BYTES)

    def all_free_bytes(self) -> int:
        return self.free_bytes()

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(total - free, total)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self.stream(), _fixed_segments():  # it is filled in the queue that reads it
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def prepare(self, batch: Batch) -> Batch:
        return as_paged(batch) if self._has_kernels and is_padded(batch) else batch

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        return self._finisher.submit(work)

    def join_ranks(self, meeting: Meeting) -> Collectives:
        collectives, self._turns = cuda_ranks.join_ranks(meeting, self.torch_device, self._has_kernels)
        return collectives

    def close(self) -> None:
        self._finisher.shutdown(wait=True)
        torch.cuda.synchronize(self.torch_device)

    # -- before the first request ----------------------------------------------------------------------------------

    def begin_compiling(self, work: Callable[[], object]) -> None:
        if self._compilers is None or not self._has_kernels or self.capability != _WGMMA:
            return  # elsewhere kernels are compiled about as fast as weights are loaded
        from text_generation_inference.kernels.triton.compile_ahead import begin_only

        with begin_only(self._compilers):
            work()

    @contextmanager
    def compiling(self) -> Generator[None, None, None]:
        if not self._has_kernels:
            yield
            return
        from text_generation_inference.kernels.triton.compile_ahead import compile_only

        with nullcontext() if self._turns is None else self._turns.compile():
            workers, self._compilers = self._compilers or _start_compilers(), None
            with compile_only(min(_COMPILE_THREADS, len(os.sched_getaffinity(0))), workers):
                yield

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        return max(0, torch.cuda.max_memory_reserved(self.torch_device) - before)

    def forget_captures(self, pool: str | None = None) -> None:
        for name in list(self._pools) if pool is None else [pool]:
            del self._num_captured[name]
            self._pools.pop(name, None)  # torch takes no new capture into a pool whose graphs are all gone

    # -- the queue -------------------------------------------------------------------------------------------------

    def stream(self) -> AbstractContextManager[Any]:
        return _OnStream(self._queue)

    def _after_loading(self) -> None:
        """Weights and cache were filled outside the queue."""
        self._queue.wait_stream(torch.cuda.default_stream(self.torch_device))

    def pinned_int32(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def send(self, host: Tensor) -> Tensor:
        # From memory that is not pinned, a copy would wait for everything that is queued. Torch keeps what it pins
        # until the copy is done, and takes it again afterwards.
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def event(self) -> Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self._queue)
        return _CudaEvent(event)

    def fetch(self, found: Tensor) -> Tensor:
        return found.to("cpu", non_blocking=True)

    def timed(self, work: Callable[[], object]) -> Callable[[], float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(self._queue)
        work()
        end.record(self._queue)
        return lambda: start.elapsed_time(end) / 1000

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        try:
            with self.stream():
                finish = queue()
                event = self._idle_events.pop() if self._idle_events else torch.cuda.Event(blocking=True)
                event.record(self._queue)
        except Exception as error:  # a failed step is told like one that fails on the device
            return failed_step(error)

        def wait_and_finish() -> Any:
            event.synchronize()
            self._idle_events.append(event)
            return finish()

        return self._finisher.submit(wait_and_finish)

    def wait_until_computing(self, step: "Future[Any]", seconds: float | None = None) -> None:
        pass  # whoever plans has queued it

    def capture(self, work: Callable[[], T], pool: str = STEPS) -> tuple[Callable[[], None], T]:
        """Kernels and workspaces that work needs must be there already: such a step was queued before."""
        if not self._has_kernels:  # torch's own ops look at values on the host, which a capture may not

            def again() -> None:
                work()

            with self.stream():
                return again, work()
        self._after_loading()
        with self.stream():
            self._queue.synchronize()
            self._finisher.submit(_do_nothing).result()  # what steps have left is freed: see `_no_collection`
            if pool not in self._pools:
                self._pools[pool] = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`, which collects garbage and empties caches each time.
            with _no_collection(), _fixed_segments():
                graph.capture_begin(pool=self._pools[pool], capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    with suppress(RuntimeError):  # the first error is the one to tell
                        graph.capture_end()
                    if not self._num_captured[pool]:
                        self.forget_captures(pool)
                    raise
                graph.capture_end()
            self._num_captured[pool] += 1
        return graph.replay, result

    def wrap_graphs(
        self, forward: Callable[[Batch], Tensor], first: Callable[[Batch], object] | None = None
    ) -> GraphForward:
        return CapturedForward(self, forward, first)


def choose_card(place: Place, num_cards: int, may_share: bool) -> tuple[int | None, int]:
    """The card of a rank, and how many ranks share it; None: the one that is chosen already. Raises `StartError`."""
    if place.world == 1:
        return None, 1
    if place.local_world > num_cards and not may_share:
        raise StartError(
            f"`num_shard` is {place.world}, {place.local_world} of them here, but only {num_cards} GPUs can be used:"
            " lower it, or let CUDA_VISIBLE_DEVICES name more"
        )
    return place.local_rank % num_cards, -(-place.local_world // num_cards)


def _grow_segments(grow: bool) -> None:
    """Whether torch maps more memory behind what it has (where it can), or takes a piece of its own for each lack."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{grow}")  # pyright: ignore


@contextmanager
def _fixed_segments() -> Generator[None, None, None]:
    """For what stays where it is until the end."""
    _grow_segments(False)
    try:
        yield
    finally:
        _grow_segments(True)


@contextmanager
def _no_collection() -> Generator[None, None, None]:
    """Pinned memory freed during a capture leaves an event in it, and torch fails when it asks for that later."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _do_nothing() -> None:
    pass


def _folder_of_kernels(cache_dir: Path) -> Path:
    """Where those of these very sources are kept: whether any is there says whether all must be compiled."""
    digest = hashlib.sha256()
    for source in sorted(Path(compile_workers.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return cache_dir / "triton" / digest.hexdigest()[:16]


def _start_compilers(compiled: Path | None = None) -> Workers | None:
    """Processes that compile get ready while weights are loaded: several where no kernel was ever compiled, one for the
    kernel that takes longest where another model's were."""
    cores = len(os.sched_getaffinity(0))
    if cores < _MANY_CORES:
        return None
    is_new = compiled is not None and (not compiled.is_dir() or not any(compiled.iterdir()))
    return Workers(_READY_COMPILERS if is_new else 0 if compiled is None else 1)


def _read_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)  # pyright: ignore


class _OnStream:
    """`torch.cuda.stream`, without the questions that it asks on the way in and out: every step passes here."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)  # pyright: ignore
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)  # pyright: ignore

    def __exit__(self, *error: object) -> None:
        torch._C._cuda_setStream(*self._before)  # pyright: ignore


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def explain_missing(torch_version: str, torch_cuda: str | None, driver: Driver, custom_kernels: bool) -> None:
    """Raise `StartError` with the way out if no GPU can be used here."""
    instead = "`device` cpu runs without a GPU."
    if torch_cuda is None:
        raise StartError(
            f"`device` cuda needs a PyTorch built for CUDA; {torch_version} is not. Install one, or: {instead}"
        )
    if tuple(int(part) for part in torch_version.split(".")[:2]) < _MIN_TORCH:
        raise StartError(
            f"`device` cuda needs PyTorch {_dotted(_MIN_TORCH)} or later; this is {torch_version}. {instead}"
        )
    if driver.problem:
        raise StartError(f"`device` cuda: no GPU can be used, {driver.problem}. {instead}")
    built_for = tuple(int(part) for part in torch_cuda.split(".")[:2])
    if driver.cuda is not None and driver.cuda[0] < built_for[0]:
        can = f"{driver.cuda[0]}.{driver.cuda[1]}"
        raise StartError(
            f"`device` cuda: the NVIDIA driver is too old. It runs CUDA up to {can}, PyTorch {torch_version} is built"
            f" for CUDA {torch_cuda}. Update the driver, or install a PyTorch built for CUDA {can} or older. {instead}"
        )
    gpu = driver.gpus[0]
    if gpu.capability < _MIN_CAPABILITY:
        raise StartError(
            f"`device` cuda: {gpu.name} has compute capability {_dotted(gpu.capability)}, at least"
            f" {_dotted(_MIN_CAPABILITY)} is needed. CUDA_VISIBLE_DEVICES chooses another GPU. {instead}"
        )
    if custom_kernels and importlib.util.find_spec("triton") is None:
        raise StartError(
            "`device` cuda needs Triton, which is not installed: install the package triton that belongs to PyTorch"
            f" {torch_version}. Without it `--disable-custom-kernels` computes with torch's own ops, many times"
            f" slower. {instead}"
        )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
