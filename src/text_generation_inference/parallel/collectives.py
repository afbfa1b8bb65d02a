"""Sums and gathers over ranks, whatever carries them, and how ranks come together.

Every rank calls the same ones in the same order with tensors of the same shape, and gets the same bits. Which way is
fastest is the device's business: `open_collectives` asks it to join a `Meeting`.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from text_generation_inference.errors import StartError
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.matrices import Rows
from text_generation_inference.kernels.ops import Ops

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore
TIMEOUT_S = 60.0  # a rank that has not come to a sum by then will not come


class Collectives(Protocol):
    @property
    def description(self) -> str:
        """What carries them, for the log."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; `x` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """What each rank has, in the order of ranks."""
        ...

    def all_reduce_add_rms_norm(
        self, ops: Ops, x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        """`ops.add_rms_norm` of the sum over ranks: (normalised, new residual)."""
        ...


class Unfused:
    """What follows a sum, where no kernel does both."""

    description = ""

    def all_reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def all_reduce_add_rms_norm(
        self, ops: Ops, x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps, quantize_for)


class TorchCollectives(Unfused):
    """Through torch.distributed's default group: gloo, NCCL or HCCL."""

    def __init__(self, before: Callable[[], None] | None = None, description: str = "torch.distributed") -> None:
        self.description = description
        self.pretends = False  # nothing is summed: while ranks only compile what steps need, and not in step
        self._before = before  # each, on a device that gathers ops: launches them

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.pretends:
            return x
        if self._before is not None:
            self._before()
        dist.all_reduce(x)  # pyright: ignore[reportUnknownMemberType]
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        world = dist.get_world_size()
        if self.pretends:
            return [x] * world
        parts = x.new_empty(world * x.numel())
        if self._before is not None:
            self._before()
        _gather(parts, x.reshape(-1))
        return list(parts.view(world, *x.shape).unbind(0))


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks that are about to share a model."""

    rank: int
    world: int
    store: Store
    timeout_s: float = TIMEOUT_S

    def exchange(self, what: str, said: str) -> list[str]:
        """What each rank says of something, in the order of ranks."""
        self.store.set(f"{what}/{self.rank}", said)
        return [self.store.get(f"{what}/{rank}").decode() for rank in range(self.world)]

    def local_rank(self, machine: str) -> int:
        """This rank's number among those of its machine, whose name it says."""
        return self.exchange("machines", machine)[: self.rank].count(machine)

    def connect(self, backend: str, before: Callable[[], None] | None = None) -> TorchCollectives:
        """The default group of torch.distributed. `backend`: its word for what carries, by device where several do."""
        timeout = timedelta(seconds=self.timeout_s)
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.world, timeout=timeout)
        return TorchCollectives(before, f"sums over {backend.rpartition(':')[2]}")


class Joins(Protocol):
    """A device, as far as ranks are concerned."""

    def join_ranks(self, meeting: Meeting) -> Collectives: ...


def open_collectives(device: Joins, rank: int, world: int, address: str, timeout_s: float = TIMEOUT_S) -> Collectives:
    """Called by every rank's process once, when its device is there. `address`: `file://` and a path that no earlier
    group has used, or `tcp://HOST:PORT`, where rank 0 listens."""
    if dist.is_initialized():
        raise StartError("this process is in a group of torch.distributed already: one model over ranks at a time")
    return device.join_ranks(Meeting(rank, world, _open_store(rank, world, address, timeout_s), timeout_s))


def close_collectives() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _open_store(rank: int, world: int, address: str, timeout_s: float) -> Store:
    parts = urlsplit(address)
    timeout = timedelta(seconds=timeout_s)
    if parts.scheme == "file":
        store: Store = FileStore(parts.path, world)
        store.set_timeout(timeout)
        return store
    if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
        raise ValueError(f"an address of ranks is file://PATH or tcp://HOST:PORT, not {address}")
    listens = _listen(parts.hostname, parts.port) if rank == 0 else None
    return TCPStore(parts.hostname, parts.port, world, rank == 0, timeout, master_listen_fd=listens)


def _listen(host: str, port: int) -> int | None:
    """A socket at this address alone: torch would listen on all interfaces. None: the address is one in front of this
    machine, and torch does as it does."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        try:
            listener.bind(address)
        except OSError:
            return None
        listener.listen(1024)
        return listener.detach()
