"""Runners of a model that threads share in the role of ranks, behind the face of one: all get the same plans.

Beside them may run one that has the model for itself. After every step, and after every step that is taken back, the
books of all are compared.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import Meeting, ThreadCollectives
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.engine.loop import EngineLoop
from text_generation_inference.engine.picture_memory import example_shape
from text_generation_inference.engine.rank import load_model
from text_generation_inference.models.model import Model
from text_generation_inference.models.registry import read_config
from text_generation_inference.parallel import Parallel
from text_generation_inference.pictures.rules import find_rule
from text_generation_inference.runner import kv_cache
from text_generation_inference.runner.runner import Runner
from text_generation_inference.runner.shapes import guess_limits, plan_shapes
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.scheduler import Scheduler
from text_generation_inference.text.grammar import GrammarCompiler
from text_generation_inference.types import PicturePolicy, StepPlan, StepResult
from text_generation_inference.weights.source import ModelFolder

_NUM_PICTURES = 8  # that layers of cross-attention have room for


@dataclass
class Lack:
    """A rank has no memory for a step, from this one of its collectives on."""

    rank: int
    place: int


@dataclass
class LackingCollectives(ThreadCollectives):
    left: int | None = None  # collectives until there is no memory; None: there is enough

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if self.left is not None:
            if self.left == 0:
                raise torch.OutOfMemoryError("no memory for a collective")
            self.left -= 1
        return super().all_gather(x)


class ThreadRunners:
    """`world` ranks; with `beside` one more runner, alone with the whole model, which must do the same."""

    def __init__(
        self,
        folder: Path,
        world: int,
        config: ServerConfig,
        make_device: Callable[[], CpuDevice],
        num_blocks: int,
        make_grammars: Callable[[], GrammarCompiler] | None = None,
        beside: bool = False,
    ) -> None:
        self.meeting = Meeting(world)
        self.collectives = [LackingCollectives(rank, self.meeting) for rank in range(world)]
        self.lacks: dict[int, Lack] = {}  # by how many steps came before
        self.num_steps = self.num_taken_back = 0
        self._blocks: dict[int, int] = {}  # of each slot that has a request: how many it was told of
        self._conductor = ThreadPoolExecutor(1)
        parallels = [Parallel(rank, world, each) for rank, each in enumerate(self.collectives)]
        if beside:
            parallels.append(Parallel())
        self._threads = [ThreadPoolExecutor(1) for _ in parallels]
        self.world = world

        def make(parallel: Parallel) -> Runner:
            device = make_device()
            source, found = ModelFolder(model_id="tiny", path=folder, note=""), read_config(folder)
            model = load_model(config, source, found, None, device, torch.float32, parallel, lambda *_: None)
            limits = guess_limits(config, model.max_positions, device.limits)
            plan = plan_shapes(config, device.limits, limits, False)
            num_picture_blocks = 1 + _num_cross_rows(model, device.limits.block_size)[0] // device.limits.block_size
            cache = kv_cache.allocate(device, model.caches(torch.float32), num_blocks, num_picture_blocks)
            sizes = (limits.max_batch_size, limits.max_total_tokens)
            grammars = None if make_grammars is None else make_grammars()
            if model.sight is not None and (rule := find_rule(folder, found.fields)) is not None:
                model.look_through(rule.normalisation, example_shape(rule))
            pixels = Path(config.picture_folder) if config.picture_folder is not None else None
            runner = Runner(device, model, cache, *sizes, (0.5, 2.0), grammars, plan, picture_folder=pixels)
            for bucket in plan.shapes:
                runner.steps.warm(bucket)
            return runner

        self.runners = self._each([partial(make, parallel) for parallel in parallels])

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        return self._conductor.submit(self._step, plan)

    def forget(self) -> None:
        """After a step that failed half way on some rank, wherever the others were."""
        self.num_taken_back += 1
        self.meeting.barrier.reset()
        self._blocks.clear()
        self._each([runner.forget for runner in self.runners])
        self.compare()

    def close(self) -> None:
        for thread in (self._conductor, *self._threads):
            thread.shutdown()
        for runner in self.runners:
            runner.device.close()

    def _step(self, plan: StepPlan) -> StepResult:
        lack = self.lacks.get(self.num_steps)
        self.num_steps += 1
        works = [partial(self._on_rank, rank, plan, lack) for rank in range(len(self.runners))]
        first, *others = self._each(works)
        for slot in plan.release:
            del self._blocks[slot]
        self._blocks |= {admission.slot: len(admission.block_ids) for admission in plan.admit}
        self._blocks |= {slot: start + len(blocks) for slot, start, blocks in plan.grow}
        for other in others:
            assert other.token_ids == first.token_ids and other.errors == first.errors
        self.compare()
        return first

    def _on_rank(self, rank: int, plan: StepPlan, lack: Lack | None) -> StepResult:
        runner = self.runners[rank]
        if rank == self.world:
            return runner.launch(plan).result()
        collectives = self.collectives[rank]
        lacks = lack is not None and lack.rank == rank
        collectives.left = lack.place if lack is not None and lacks else None
        try:
            result = runner.launch(plan).result()
            if lacks:
                raise torch.OutOfMemoryError("no memory behind the last collective")
            return result
        except threading.BrokenBarrierError as error:
            raise torch.OutOfMemoryError("another rank had none") from error
        except BaseException:
            self.meeting.barrier.abort()
            raise
        finally:
            collectives.left = None

    def _each(self, works: list[Callable[[], Any]]) -> list[Any]:
        """What each thread returns once all are done; else the first failure that is no lack of memory, or any."""
        futures = [thread.submit(work) for thread, work in zip(self._threads, works, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, torch.OutOfMemoryError):
                raise error
        return [future.result() for future in futures]

    def compare(self) -> None:
        """What each runner knows of requests; nothing runs."""
        first, *others = [_books(runner, self._blocks) for runner in self.runners]
        for rank, other in enumerate(others, 1):
            differing = {name: (first[name], other[name]) for name in first if first[name] != other[name]}
            assert not differing, (rank, self._blocks, differing)


def _books(runner: Runner, blocks: dict[int, int]) -> dict[str, Any]:
    """Of slots with so many blocks."""
    found, state, slots = runner.slots, runner.slots.state, list(blocks)
    known = [state.history(slot, int(state.lengths[slot]) - 1) for slot in slots]  # the last one is in the record
    return {
        "decode set": found.decode_slots,
        "rows": state.rows.tolist(),
        "lengths on the host": found.lengths_cpu[slots].tolist(),
        "records": state.records[slots, : state.NUMBERS + len(state.numbers)].tolist(),
        "blocks": [state.block_tables[slot, :count].tolist() for slot, count in blocks.items()],
        "tokens": [tokens.tolist() for tokens in known],
    }


@dataclass
class ThreadEngine:
    """What `driving.run` needs of an engine."""

    loop: EngineLoop
    runners: ThreadRunners


def plain_device(cache_dir: Path) -> CpuDevice:
    return CpuDevice(cache_dir, custom_kernels=False)


@contextmanager
def start_threads(
    folder: Path,
    world: int,
    make_device: Callable[[Path], CpuDevice] = plain_device,
    num_blocks: int = 200,
    overlap: bool = True,
    make_grammars: Callable[[], GrammarCompiler] | None = None,
    beside: bool = False,
    **settings: Any,
) -> Iterator[ThreadEngine]:
    asked: dict[str, Any] = {"max_batch_size": 8, "max_total_tokens": 64, "max_batch_prefill_tokens": 40, **settings}
    config = ServerConfig(model_id=str(folder), **asked)
    with tempfile.TemporaryDirectory() as cache_dir:
        devices = partial(make_device, Path(cache_dir))
        runners = ThreadRunners(folder, world, config, devices, num_blocks, make_grammars, beside)
        try:
            yield ThreadEngine(make_loop(runners, config, num_blocks, overlap), runners)
        finally:
            runners.close()


def make_loop(runners: ThreadRunners, config: ServerConfig, num_blocks: int, overlap: bool = True) -> EngineLoop:
    """A scheduler with an empty cache; no request is in the runners."""
    plan = runners.runners[0].steps.plan
    pool = BlockPool(num_blocks, runners.runners[0].slots.state.block_size, not plan.pads)
    policy = BatchPolicy(
        max_batch_prefill_tokens=config.max_batch_prefill_tokens or 0,
        max_batch_size=config.max_batch_size or 0,
        max_total_tokens=config.max_total_tokens or 0,
    )
    pictures = None
    if (sight := runners.runners[0].model.sight) is not None:
        most, each = _num_cross_rows(runners.runners[0].model, pool.block_size)
        pictures = PicturePolicy(
            max_features=most or config.max_total_tokens or 0,
            whole_runs=sight.whole_runs,
            whole_prompts=sight.whole_prompts,
            cross_rows=each,
            num_parts=sight.num_parts,
        )
    scheduler = Scheduler(policy, pool, shapes=plan if plan.pads else None, pictures=pictures)
    return EngineLoop(scheduler, runners, overlap, runners.forget)


def _num_cross_rows(model: Model, block_size: int) -> tuple[int, int]:
    """That are kept for layers of cross-attention, and those of a picture."""
    each = 0 if model.sight is None else -(-model.sight.cross_rows // block_size) * block_size
    return _NUM_PICTURES * each, each
