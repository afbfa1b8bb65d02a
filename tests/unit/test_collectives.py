"""Sums and gathers over ranks: which way each takes, what is launched before it, and who waits for whom."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.devices.cuda_ranks import CompileTurns
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.parallel.collectives import (
    Meeting,
    TorchCollectives,
    Unfused,
    open_collectives,
)
from text_generation_inference.parallel.symmetric import SymmetricCollectives, Ways, choose_ways


def test_gathered_ops_are_launched_before_each(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x: order.append("sum"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("text_generation_inference.parallel.collectives._gather", lambda out, x: order.append("gather"))
    collectives = TorchCollectives(before=lambda: order.append("launch"))
    collectives.all_reduce(torch.ones(1))
    assert len(collectives.all_gather(torch.ones(1))) == 2
    assert order == ["launch", "sum", "launch", "gather"]


def test_ways_follow_what_was_measured() -> None:
    sizes = (1, 2, 4, 8)
    assert choose_ways(sizes, [1, 2, 4, 8], [3, 3, 3, 3], None) == Ways(2, None)
    assert choose_ways(sizes, [1, 2, 4, 8], [3, 3, 3, 3], [5, 5, 2, 5]) == Ways(2, 2)
    assert choose_ways(sizes, [1, 2, 4, 8], [3, 3, 3, 3], [5, 5, 5, 5]) == Ways(2, 8)
    assert choose_ways(sizes, [9, 9, 9, 9], [3, 3, 3, 3], [1, 1, 1, 1]) == Ways(1, 1)  # the smallest is always ours


class FakeKernels:
    """Of a single rank that has itself as its peer."""

    def __init__(self) -> None:
        self.called: list[object] = []

    def all_reduce(self, x: torch.Tensor, two_shot: bool) -> torch.Tensor:
        self.called.append(two_shot)
        return x * 2

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.called.append("gather")
        return torch.stack([x, x])

    def fits_norm(self, x: torch.Tensor) -> bool:
        return x.shape[0] < 4

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, *about: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.called.append("norm")
        return x, residual


class Other(Unfused):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x] * 3


def test_sizes_take_the_way_that_was_measured() -> None:
    kernels, weight = FakeKernels(), torch.ones(4)
    collectives = SymmetricCollectives(kernels, Ways(one_shot_bytes=16, own_bytes=64), Other())
    rows = {count: torch.ones(count, 4) for count in (1, 2, 4, 8)}  # 16 bytes each
    assert [float(collectives.all_reduce(x)[0, 0]) for x in rows.values()] == [2, 2, 2, 3]
    assert kernels.called == [False, True, True]
    assert [len(collectives.all_gather(x)) for x in rows.values()] == [2, 2, 2, 3]
    assert collectives.all_reduce(torch.tensor([3])).tolist() == [6]
    kernels.called.clear()
    for x in rows.values():
        collectives.all_reduce_add_rms_norm(Ops(), x, x, weight, 1e-5)
    assert kernels.called == ["norm", "norm", True]  # four rows are summed alone, eight elsewhere
    alone = SymmetricCollectives(kernels, Ways(one_shot_bytes=16, own_bytes=None), None)
    assert float(alone.all_reduce(rows[8])[0, 0]) == 2


def test_the_first_rank_of_a_machine_compiles_for_the_others() -> None:
    """The others begin when it has ended; meanwhile nobody sums."""
    store, order = HashStore(), list[str]()
    bases = [TorchCollectives(), TorchCollectives()]

    def compile_as(rank: int) -> None:
        with CompileTurns(Meeting(rank, 2, store), bases[rank]).compile():
            order.append(f"{rank} begins")
            assert bases[rank].pretends and bases[rank].all_reduce(weight) is weight
            time.sleep(0.05)
            order.append(f"{rank} ends")

    weight = torch.ones(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_as, (1, 0)))
    assert order == ["0 begins", "0 ends", "1 begins", "1 ends"]
    assert not bases[0].pretends and not bases[1].pretends


def test_an_address_is_a_file_or_a_port() -> None:
    with pytest.raises(ValueError, match=r"file://PATH or tcp://HOST:PORT, not ipc:///x"):
        open_collectives(CpuDevice(Path(), custom_kernels=False), 0, 2, "ipc:///x")
