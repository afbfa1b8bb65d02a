"""How GPUs of several ranks sum: through memory that they map of each other, and NCCL for what is large.

Ranks that share a card, as tests on one have it, do without NCCL, and their kernels leave room for each other: one that
waits for a peer must not take the place that the peer's kernel needs.
"""

import ctypes
import os
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from text_generation_inference.errors import StartError
from text_generation_inference.parallel.collectives import Collectives, Meeting, TorchCollectives
from text_generation_inference.parallel.symmetric import PeerKernels, SymmetricCollectives, Ways, measure_ways

_CALLS = 10  # in a captured graph that is timed
_SHARED_WAYS = Ways(one_shot_bytes=512 << 10, own_bytes=None)


class CompileTurns:
    """Ranks of a machine compile one after the other: what the first has left on disk, the others find there."""

    def __init__(self, meeting: Meeting, base: TorchCollectives) -> None:
        self._machine = socket.gethostname()
        self._is_first = meeting.local_rank(self._machine) == 0
        self._store, self._base, self._count = meeting.store, base, 0

    @contextmanager
    def compile(self) -> Generator[None, None, None]:
        """Inside, nothing is summed: ranks are not in step."""
        self._count += 1
        done = f"compiled/{self._machine}/{self._count}"
        self._base.pretends = True
        if not self._is_first:
            with suppress(RuntimeError):  # the first one is very slow: help it
                self._store.get(done)
        try:
            yield
        finally:
            self._base.pretends = False
            if self._is_first:
                self._store.set(done, "")


def join_ranks(meeting: Meeting, device: torch.device, has_kernels: bool) -> tuple[Collectives, CompileTurns]:
    properties = _read_properties(device)
    cards = meeting.exchange("cards", f"{socket.gethostname()} {properties.uuid}")
    processors = min(int(count) for count in meeting.exchange("processors", str(properties.multi_processor_count)))
    most = max(Counter(cards).values())  # ranks on one card
    base = meeting.connect("gloo" if most > 1 else "cpu:gloo,cuda:nccl")
    other, turns = None if most > 1 else base, CompileTurns(meeting, base)
    if not has_kernels or len({card.partition(" ")[0] for card in cards}) > 1:
        return base, turns
    problem, opened = "", None
    try:
        opened = _open_peers(meeting, device, most, processors)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    problems = [f"rank {rank}: {said}" for rank, said in enumerate(meeting.exchange("peers", problem)) if said]
    if opened is None or problems:
        if most > 1:
            raise StartError(f"{most} ranks share a GPU and cannot read each other's memory there: {problems[0]}")
        return base, turns  # GPUs that do not see each other's memory: NCCL knows other ways
    ways = _SHARED_WAYS if other is None else measure_ways(opened, other, microseconds, make_values(device))
    return SymmetricCollectives(opened, ways, other), turns


def _read_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)  # pyright: ignore


def _open_peers(meeting: Meeting, device: torch.device, most: int, processors: int) -> PeerKernels:
    import torch.distributed._symmetric_memory as symmetric_memory

    from text_generation_inference.kernels.triton.all_reduce import BUFFER_BYTES, MAX_PROGRAMS, MAX_RANKS, Peers

    if meeting.world > MAX_RANKS:
        raise RuntimeError(f"at most {MAX_RANKS} ranks")
    if most > 1:
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    memory: Any = symmetric_memory
    buffer: Tensor = memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(buffer, dist.group.WORLD)  # all ranks' buffers are zeros now
    for held in (buffer, handle):
        # Until the process ends: given back after a rank has died, or while the interpreter ends, it would be aborted.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    peers = Peers(
        rank=meeting.rank,
        world=meeting.world,
        table=torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        counts=torch.zeros((MAX_PROGRAMS, 2), dtype=torch.int32, device=device),
        num_programs=min(MAX_PROGRAMS, processors // most),
        shared=most > 1,
        owner=(buffer, handle),
    )
    torch.cuda.synchronize(device)  # other streams will read them
    return peers


def make_values(device: torch.device) -> Callable[[int], Tensor]:
    """In the type that most models have on this GPU."""
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return lambda size: torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)


def microseconds(work: Callable[[], object]) -> float:
    """Of one call inside a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()  # compiles, connects
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            work()
        graph.capture_end()
        times: list[float] = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times[1:]) / _CALLS
