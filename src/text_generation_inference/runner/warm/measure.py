"""Compiles what steps need, and measures what they take beside weights and cache: before there is a cache, and with it.

Made-up steps do both (`dry_run`). What is run differs between steps over block tables and padded passes, the order
and the sum do not.
"""

import gc
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from text_generation_inference.config import Resolved
from text_generation_inference.devices.device import Device
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.errors import EngineError, ResourceError
from text_generation_inference.runner.paged_steps import PagedSteps
from text_generation_inference.runner.runner import Runner
from text_generation_inference.runner.shapes import BucketPlan, PlanLimits, ShapePlan
from text_generation_inference.runner.warm.dry_run import (
    EVERYTHING,
    PLAIN,
    SAMPLED,
    SHORTEST,
    DryRun,
    run_captured,
    run_choices,
    run_decode,
    run_largest,
    run_prefix,
    run_prompts,
)

_FEW_SIZES = (1, 2, 8, 16)  # kernels differ where a number is 1 or divisible by 16
_FEW = 32
_SHORTEST_CHECKED = 8  # tokens that a request of the largest step must be allowed
_HOLES = 0.5  # of the largest step: what may lie idle between the tensors of another one


class StepBytes(msgspec.Struct):
    """What steps take beside weights and cache.

    Tensors of another step lie elsewhere than those of the measured one, and between them there is room for none. Where
    memory ends there, torch unmaps what is free and maps it again elsewhere, layer after layer, while the device waits.
    """

    slots: int = 0
    graphs: int = 0  # they share memory of their own
    without_graph: int = 0  # the largest step that has none
    holes: int = 0

    @property
    def total(self) -> int:
        return self.slots + self.graphs + self.without_graph + self.holes


class _MadeUpSteps(Protocol):
    """Run on a runner over a cache of one block."""

    rows: int
    tokens: int  # of the largest step

    def compile(self, run: DryRun) -> None:
        """Everything of which a kernel may depend; nothing is computed."""
        ...

    def make_workspaces(self, run: DryRun) -> None:
        """They stay."""
        ...

    def graphs(self, run: DryRun) -> Iterable[Callable[[], object]]:
        """What graphs take is the most that one of these does."""
        ...

    def largest(self, run: DryRun) -> None: ...


class _TableSteps:
    """Steps over block tables."""

    def __init__(self, plan: ShapePlan, limits: PlanLimits, length: int) -> None:
        self.rows = limits.max_batch_size
        self.tokens = max(self.rows, limits.max_batch_prefill_tokens)
        self._length = length
        self._few = [size for size in _FEW_SIZES if size < self.rows]
        self._capture = [bucket.batch for bucket in plan.shapes if bucket.phase == "decode"]
        self._captured_tokens = max((b.num_tokens for b in plan.shapes if b.phase == "mixed"), default=0)

    def compile(self, run: DryRun) -> None:
        run_prefix(run, self.tokens, self._length)  # first: its kernel takes longest
        self._run_all(run, min(self.rows, _FEW))
        run_decode(run, self._capture)

    def make_workspaces(self, run: DryRun) -> None:
        run_decode(run, [self.rows, *self._few])

    def graphs(self, run: DryRun) -> Iterable[Callable[[], object]]:
        yield lambda: run_decode(run, [self.rows], PLAIN)
        yield lambda: run_decode(run, [self.rows], SAMPLED)
        if self._captured_tokens:
            yield lambda: run_captured(run, self.rows, self._captured_tokens, self._length)

    def largest(self, run: DryRun) -> None:
        self._run_all(run, self.rows)

    def _run_all(self, run: DryRun, rows: int) -> None:
        run_largest(run, rows, self.tokens, self._length)
        run_prompts(run, rows, self.tokens, self._length)
        run_decode(run, [rows, *self._few])
        run_decode(run, [rows, *self._few], SAMPLED)
        run_decode(run, self._few or [1], EVERYTHING)


class _PaddedPasses:
    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self.rows = max(bucket.batch for bucket in plan.decode)
        prompts = [bucket for bucket in plan.shapes if bucket.phase == "prefill"]
        self._largest = max(prompts, key=lambda bucket: bucket.cost)
        self.tokens = self._largest.num_tokens
        self._sizes = [self.rows, *(size for size in _FEW_SIZES if size < self.rows)]

    def compile(self, run: DryRun) -> None:
        for bucket in self._plan.shapes:
            run.steps.go_without(bucket)  # nothing is launched, so there is nothing to capture
            run.steps.run_shallow(bucket)
        run_choices(run, self._sizes)

    def make_workspaces(self, run: DryRun) -> None:
        run.steps.run_shallow(self._largest)

    def graphs(self, run: DryRun) -> Iterable[Callable[[], object]]:
        captured = [bucket for bucket in self._plan.shapes if run.steps.captures(bucket)]
        yield lambda: [run.steps.warm(bucket) for bucket in captured]

    def largest(self, run: DryRun) -> None:
        run.steps.run_shallow(self._largest)
        run_choices(run, self._sizes)


def measure_steps(
    device: Device,
    plan: ShapePlan,
    limits: PlanLimits,
    length: int,  # tokens of the longest request
    make_runner: Callable[[int, int], Runner],  # for so many requests of so many tokens; a cache of one block
) -> StepBytes:
    """Compiles kernels too."""
    length = max(SHORTEST, length)
    steps: _MadeUpSteps = _PaddedPasses(plan) if isinstance(plan, BucketPlan) else _TableSteps(plan, limits, length)

    def start() -> DryRun:
        return DryRun(make_runner(steps.rows, length), steps.rows, device.limits.block_size)

    try:
        with device.compiling():
            run = start()
            steps.compile(run)
        del run
        made: list[DryRun] = []
        slots = device.peak_bytes(lambda: made.append(start()))
        steps.make_workspaces(made[0])
        graphs = max(device.peak_bytes(part) for part in steps.graphs(made[0]))
        without_graph = device.peak_bytes(lambda: steps.largest(made[0]))
        if made[0].steps.num_captured:
            made.clear()
            gc.collect()  # its graphs refer to it
            device.forget_captures()
        return StepBytes(slots, graphs, without_graph, int(_HOLES * without_graph))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise EngineError(f"the device cannot compute: {error}") from error
        raise ResourceError(
            f"Not enough memory for a step of {steps.tokens} tokens and {steps.rows} requests once the weights are"
            f" loaded: lower `max_batch_prefill_tokens` or `max_batch_size` ({str(error).split('. ')[0]})"
        ) from None


def largest_step_fits(runner: Runner, resolved: Resolved) -> bool:
    """Whether the largest permitted steps run beside the cache, as they did before there was one. They take their
    memory now, and not while somebody waits: one layer of each kind takes as much as all. `runner` has no requests."""
    rows, length = resolved.max_batch_size, resolved.max_total_tokens
    if length < _SHORTEST_CHECKED:
        return True
    run, steps = DryRun(runner, rows, resolved.block_size), runner.steps
    assert isinstance(steps, PagedSteps)  # shapes of a plan that pads are met one by one
    try:
        with steps.few_layers():
            run_largest(run, rows, max(rows, resolved.max_batch_prefill_tokens), length, times=1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise EngineError(f"the device cannot compute: {error}") from error
        return False
    run.release()
    return True
