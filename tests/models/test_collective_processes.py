"""Ranks as processes: how they come together, and that all of them get the same sums."""

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.kernels import reference
from text_generation_inference.kernels.fp8 import apply_scales
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.partial_sum import PartialSum
from text_generation_inference.parallel import Parallel
from text_generation_inference.parallel.collectives import (
    close_collectives,
    open_collectives,
)

WORLD = 2


def given(rank: int) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4) * (rank + 1) - 5


def run_rank(rank: int, folder: Path, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = CpuDevice(folder, custom_kernels=False)
    for address in (f"file://{folder / 'meeting'}", f"tcp://127.0.0.1:{port}"):
        parallel = Parallel(rank, WORLD, open_collectives(device, rank, WORLD, address, timeout_s=30))
        whole = given(0) + given(1)
        assert torch.equal(parallel.all_reduce(given(rank)), whole)
        assert torch.equal(parallel.all_gather_last(given(rank)), torch.cat([given(0), given(1)], -1))
        small = (given(rank) > 0).to(torch.uint8)[:, ::2]
        assert torch.equal(parallel.all_gather_last(small)[:, 2 * rank : 2 * rank + 2], small)
        residual, weight = torch.ones(3, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])
        found = parallel.all_reduce_add_rms_norm(Ops(), given(rank), residual, weight, 1e-5)
        expected = reference.add_rms_norm(whole, residual, weight, 1e-5)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert torch.equal(apply_scales(PartialSum(given(rank), parallel)), whole)
        close_collectives()
    assert not dist.is_initialized()


def test_processes_sum_and_gather(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, (tmp_path, port), nprocs=WORLD)
