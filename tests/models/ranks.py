"""Runs one prompt through a model split over several ranks: processes of their own, or threads of this one."""

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.engine.calibrate import read_quant_config
from text_generation_inference.engine.rank import load_model
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.models.registry import read_config, read_quantization
from text_generation_inference.parallel import Parallel
from text_generation_inference.parallel.collectives import Unfused
from text_generation_inference.quant.choose import choose_quantization
from text_generation_inference.runner import kv_cache
from text_generation_inference.weights.source import ModelFolder

T = TypeVar("T")
PROMPT = [5, 9, 200, 31, 77, 8, 15, 300, 2]


def logits_of_ranks(folder: Path, world: int) -> Tensor:
    """`[tokens, vocab]` logits of PROMPT, computed by `world` processes."""
    with tempfile.TemporaryDirectory() as meeting:
        if world == 1:
            _run(0, 1, folder, Path(meeting))
        else:
            mp.spawn(_run, (world, folder, Path(meeting)), nprocs=world)
        results = [torch.load(Path(meeting) / f"{rank}.pt", weights_only=True) for rank in range(world)]
    return _agreed(results)


def check_ranks(folder: Path, expected: Tensor, ops: Ops | None = None, quantize: str | None = None) -> None:
    """2 and 4 threads as ranks compute these logits of PROMPT, or of as much of it as there is."""
    for world in (2, 4):
        found = logits_of_threads(folder, world, quantize, ops)[: len(expected)]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def check_near_ranks(folder: Path, plain: Tensor, **how: Any) -> None:
    """The same of what rounds inputs, now and then the other way: the difference is small beside that to `plain`."""
    one = logits_of_threads(folder, 1, **how)
    noise = (one - plain).abs().mean()
    for world in (2, 4):
        assert (logits_of_threads(folder, world, **how) - one).abs().mean() < 0.1 * noise


def logits_of_threads(
    folder: Path,
    world: int,
    quantize: str | None = None,
    ops: Ops | None = None,
    by_expert: bool = False,
    quant_config: str | None = None,
) -> Tensor:
    """The same by threads, whose sums are real and whose start costs nothing. `ops`: instead of the CPU's."""

    def compute(parallel: Parallel) -> Tensor:
        with tempfile.TemporaryDirectory() as cache_dir:
            return _compute(
                replace(parallel, by_expert=by_expert), folder, Path(cache_dir), quantize, ops, quant_config
            )

    return _agreed(as_ranks(world, compute))


def as_ranks(world: int, compute: Callable[[Parallel], T]) -> list[T]:
    """What threads in the role of ranks compute together, each with its own `Parallel`."""
    meeting = Meeting(world)

    def as_rank(rank: int) -> T:
        try:
            return compute(Parallel(rank, world, ThreadCollectives(rank, meeting)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        results = [pool.submit(as_rank, rank) for rank in range(world)]
        errors = [error for result in results if (error := result.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [result.result() for result in results]


@dataclass
class Meeting:
    """Where threads exchange what they have."""

    world: int
    given: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x.clone()
        self.barrier.wait()
        found = [self.given[each] for each in range(self.world)]
        self.barrier.wait()
        return found


@dataclass
class ThreadCollectives(Unfused):
    """Of one rank among threads."""

    rank: int
    meeting: Meeting

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.all_gather(x)).sum(0))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self.meeting.exchange(self.rank, x)


def _agreed(results: list[Tensor]) -> Tensor:
    for other in results[1:]:
        assert torch.equal(results[0], other), "ranks disagree"
    return results[0]


def _run(rank: int, world: int, folder: Path, meeting: Path) -> None:
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{meeting / 'store'}"
        dist.init_process_group("gloo", store, timedelta(seconds=60), rank=rank, world_size=world)
    torch.save(_compute(Parallel(rank, world), folder, meeting), meeting / f"{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


def _compute(
    parallel: Parallel,
    folder: Path,
    cache_dir: Path,
    quantize: str | None = None,
    ops: Ops | None = None,
    quant_config: str | None = None,
) -> Tensor:
    device = CpuDevice(cache_dir, custom_kernels=False)
    device.ops = ops or device.ops
    config = read_config(folder)
    source = ModelFolder(model_id="tiny", path=folder, note="")
    calibrated = read_quant_config(ServerConfig(quant_config=quant_config))
    quantization = choose_quantization(quantize, calibrated.quantize(read_quantization(config), device))
    model = load_model(ServerConfig(), source, config, quantization, device, torch.float32, parallel, lambda *_: None)
    cache = kv_cache.allocate(device, model.caches(torch.float32), num_blocks=4)
    model.bind(cache, 64)
    count = len(PROMPT)
    batch = Batch(
        input_ids=torch.tensor(PROMPT),
        positions=torch.arange(count),
        kv_index=16 + torch.arange(count),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        meta=PagedMeta(torch.tensor([[1]], dtype=torch.int32), 0, [0], [count], count),
    )
    with torch.inference_mode():
        return model.vocabulary.gather(model.logits(model.forward(batch, cache))).clone()
