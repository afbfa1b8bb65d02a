"""Meets every shape of a bucket plan before the first request, the smallest first, within the memory there is.

Before each shape its memory is predicted from those before it: one whose graph would not fit goes without a
graph, and one that would not fit at all ends the start with a report of how far it came, instead of a failure of the
device. What was warmed up is written down: the next start of the same model with the same settings knows how long each
shape takes, and how much memory.
"""

import gc
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from text_generation_inference.config import Resolved, ServerConfig
from text_generation_inference.devices.buckets import Bucket, BucketPlan
from text_generation_inference.devices.device import Device
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.engine.bucketing import warms_up
from text_generation_inference.engine.dry_run import EVERYTHING, SAMPLED, SHORTEST
from text_generation_inference.engine.loop import StepRunner
from text_generation_inference.errors import EngineError, ResourceError
from text_generation_inference.runner.padded_passes import PaddedPasses
from text_generation_inference.types import Admission, GenerationRequest, SamplingParams, StepPlan
from text_generation_inference.units import gigabytes
from text_generation_inference.version import __version__
from text_generation_inference.weights.progress import Progress, silent

STAGE = "warm up shapes"
_FEW_SIZES = (1, 2, 8, 16)  # kernels differ where a number is 1 or divisible by 16


class WarmableSteps(Protocol):
    passes: PaddedPasses

    def warm(self, bucket: Bucket, scored: bool = False) -> None: ...

    def run_shallow(self, bucket: Bucket) -> None: ...


class BucketedRunner(StepRunner, Protocol):
    @property
    def buckets(self) -> WarmableSteps | None: ...


class Meter(Protocol):
    """How memory is measured."""

    def free(self) -> int: ...

    def used_by(self, work: Callable[[], object], /) -> int:
        """Do it; the memory it took, for a while or for good."""
        ...


class WarmedShape(msgspec.Struct, array_like=True):
    phase: str
    batch: int
    length: int
    seconds: float
    num_bytes: int  # 0: not measured
    captured: bool

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.phase, self.batch, self.length)


class WarmRecord(msgspec.Struct):
    """What is kept of a warm-up, as JSON."""

    version: str
    settings: dict[str, Any]
    seconds: float
    num_captured: int
    shapes: list[WarmedShape]


@dataclass
class Prediction:
    """Of memory, for one phase with or without graphs: the line through what the smallest and the last one took."""

    first: tuple[int, int] | None = None  # (cost, bytes)
    cost: int = 0
    num_bytes: int = 0

    def add(self, cost: int, num_bytes: int) -> None:
        self.first = self.first or (cost, num_bytes)
        self.cost, self.num_bytes = cost, num_bytes

    def predict(self, cost: int) -> int:
        if self.first is None or self.first[0] == self.cost:
            return self.num_bytes
        slope = max(0, self.num_bytes - self.first[1]) / (self.cost - self.first[0])
        return self.num_bytes + int(slope * (cost - self.cost))


@dataclass
class WarmUp:
    steps: WarmableSteps
    plan: BucketPlan
    meter: Meter | None = None  # None: memory is not looked at
    progress: Progress = silent
    before: WarmRecord | None = None  # of an earlier start
    reserve: int = 0  # bytes that steps without a graph take, which graphs leave alone
    score: bool = True  # prompts too whose log-probabilities are asked for
    shapes: list[WarmedShape] = field(default_factory=list)
    _predictions: dict[tuple[str, bool], Prediction] = field(default_factory=dict)

    def run(self) -> float:
        """Seconds it took. Raises `ResourceError` if memory does not suffice."""
        started = time.perf_counter()
        order = sorted(self.plan.shapes, key=lambda bucket: (_cost(bucket), bucket))
        known = {shape.bucket: shape for shape in self.before.shapes} if self.before else {}
        weights = [max(1, int(1000 * known[b].seconds)) if b in known else 1 for b in order]
        if len(known) < len(order):
            weights = [1] * len(order)
        alone = {self.plan.find_prefill(1, bucket.length) for bucket in self.plan.prefill} if self.score else set()
        done = 0
        self.progress(STAGE, 0, sum(weights))
        for bucket, weight in zip(order, weights, strict=True):
            earlier = known.get(bucket)
            self.shapes.append(self._warm(bucket, bucket in alone, earlier.num_bytes if earlier else 0))
            done += weight
            self.progress(STAGE, done, sum(weights))
        return time.perf_counter() - started

    def _warm(self, bucket: Bucket, scored: bool, known_bytes: int) -> WarmedShape:
        passes, meter = self.steps.passes, self.meter
        captured, cost = passes.captures(bucket), _cost(bucket)
        prediction = self._predictions.setdefault((bucket.phase, captured), Prediction())
        if meter is not None:
            free = meter.free()
            needed = max(known_bytes, prediction.predict(cost))
            if captured and needed > free - self.reserve:
                passes.go_without(bucket)
                captured = False
                prediction = self._predictions.setdefault((bucket.phase, False), Prediction())
                if prediction.first is not None:  # else it takes for a while what its graph would keep
                    needed = max(known_bytes, prediction.predict(cost))
            if not captured and needed > free:
                raise ResourceError(self._report(bucket, needed, free))
        started = time.perf_counter()
        num_bytes = 0
        try:
            if meter is not None and cost >= 2 * prediction.cost:  # others are little larger than a known one
                num_bytes = meter.used_by(lambda: self.steps.warm(bucket, scored))
                prediction.add(cost, num_bytes)
            else:
                self.steps.warm(bucket, scored)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            free = meter.free() if meter is not None else 0
            raise ResourceError(self._report(bucket, 0, free)) from None
        seconds = time.perf_counter() - started
        return WarmedShape(bucket.phase, bucket.batch, bucket.length, round(seconds, 4), num_bytes, captured)

    def _report(self, bucket: Bucket, needed: int, free: int) -> str:
        last = f", the last one {_describe(self.shapes[-1].bucket)}" if self.shapes else ""
        lower = "`max_batch_prefill_tokens` or `max_input_tokens`" if bucket.phase == "prefill" else "`max_batch_size`"
        amount = f"about {gigabytes(needed)}" if needed else "more memory than there is"
        return (
            f"Warm-up stopped before {_describe(bucket)}: it needs {amount}, {gigabytes(free)} are free. Warm are"
            f" {len(self.shapes)} of {len(self.plan.shapes)} shapes{last}. Lower {lower}, or give the KV cache less:"
            " `max_batch_total_tokens`."
        )

    @property
    def record(self) -> WarmRecord:
        seconds = sum(shape.seconds for shape in self.shapes)
        return WarmRecord(__version__, {}, round(seconds, 3), self.steps.passes.stats.num_captured, self.shapes)


def warm_shapes(
    config: ServerConfig,
    resolved: Resolved,
    device: Device,
    steps: WarmableSteps,
    model_id: str,
    cache_dir: Path,
    progress: Progress,
    reserve: int = 0,
) -> None:
    """Unless the user does not want it. `reserve`: see `WarmUp`."""
    if not warms_up(config):
        return
    plan = steps.passes.plan
    settings = {
        "model_id": model_id,
        "device": device.name,
        **{name: getattr(config, name) for name in ("dtype", "quantize", "kv_cache_dtype", "custom_kernels")},
        "limits": [getattr(resolved, name) for name in _LIMITS],
        "plan": hashlib.sha256(repr(plan.shapes).encode()).hexdigest()[:16],
    }
    path = record_path(cache_dir, settings)
    work = WarmUp(steps, plan, choose_meter(device), progress, read_record(path), reserve + device.runtime_bytes)
    work.run()
    write_record(path, work.record, settings)


_LIMITS = ("max_input_tokens", "max_total_tokens", "max_batch_size", "max_batch_prefill_tokens", "num_blocks")


class StepBytes(msgspec.Struct):
    """What steps take beside weights and cache."""

    slots: int = 0
    graphs: int = 0
    without_graph: int = 0  # the largest step that has none

    @property
    def total(self) -> int:
        return self.slots + self.graphs + self.without_graph


def measure_shapes(
    device: Device,
    plan: BucketPlan,
    make_runner: Callable[[int, int], BucketedRunner],  # for so many requests of so many tokens; a cache of one block
    length: int,  # tokens of the longest request
) -> StepBytes:
    """Compiles kernels too."""
    rows, length = max(bucket.batch for bucket in plan.decode), max(SHORTEST, length)
    few = [size for size in _FEW_SIZES if size < rows]

    def choose(runner: StepRunner) -> None:
        for params in (SamplingParams(), SAMPLED, EVERYTHING):
            for size in (rows, *few):
                _decode_once(runner, size, params)

    try:
        with device.compiling():
            runner = make_runner(rows, length)
            steps = _steps_of(runner)
            for bucket in plan.shapes:
                steps.passes.go_without(bucket)  # nothing is launched, so there is nothing to capture
                steps.run_shallow(bucket)
            choose(runner)
        del runner, steps
        made: list[BucketedRunner] = []
        slots = device.peak_bytes(lambda: made.append(make_runner(rows, length)))
        largest = max(plan.prefill, key=_cost)
        _steps_of(made[0]).run_shallow(largest)  # makes workspaces, which stay
        graphs = [bucket for bucket in sorted(plan.shapes, key=_cost) if _steps_of(made[0]).passes.captures(bucket)]
        captured = device.peak_bytes(lambda: [_steps_of(made[0]).warm(bucket) for bucket in graphs])
        eager = device.peak_bytes(lambda: (_steps_of(made[0]).run_shallow(largest), choose(made[0])))
        made.clear()
        gc.collect()  # its graphs refer to it
        device.forget_captures()
        return StepBytes(slots, captured, eager)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise EngineError(f"the device cannot compute: {error}") from error
        raise ResourceError(
            f"Not enough memory for a step of {max(plan.prefill, key=_cost).num_tokens} tokens once the weights are"
            f" loaded: lower `max_batch_prefill_tokens` or `max_batch_size` ({str(error).split('. ')[0]})"
        ) from None


def _steps_of(runner: BucketedRunner) -> WarmableSteps:
    assert runner.buckets is not None, "a runner without a bucket plan"
    return runner.buckets


def _decode_once(runner: StepRunner, rows: int, params: SamplingParams) -> None:
    """A decode step of made-up requests, whose one token is in the block that belongs to nobody."""
    slots = list(range(rows))
    admit = [
        Admission(
            slot,
            GenerationRequest(id=slot, token_ids=[0], sampling=params, max_new_tokens=1, stop_token_ids=[], seed=0),
            [],
            [0],
        )
        for slot in slots
    ]
    for plan in (StepPlan(1, [], admit, [], slots, [], True, []), StepPlan(2, [], [], [], [], [], True, [])):
        runner.launch(plan).result()
    runner.launch(StepPlan(3, slots[1:], [], slots[1:], [], [], True, [])).result()
    runner.launch(StepPlan(4, [0], [], [0], [], [], False, [])).result()


def choose_meter(device: Device) -> Meter | None:
    """Memory is looked at where steps have it for themselves."""
    return _PeakMeter(device.all_free_bytes, device.peak_bytes) if device.limits.meters_memory else None


@dataclass
class _PeakMeter:
    free: Callable[[], int]
    used_by: Callable[[Callable[[], object]], int]


# -- the record ----------------------------------------------------------------------------------------------------


def record_path(cache_dir: Path, settings: dict[str, Any]) -> Path:
    """Where the record of a warm-up with these settings is; any other version has its own."""
    text = msgspec.json.encode([__version__, sorted(settings.items())])
    return cache_dir / "warmed" / f"{hashlib.sha256(text).hexdigest()[:24]}.json"


def read_record(path: Path) -> WarmRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=WarmRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(path: Path, record: WarmRecord, settings: dict[str, Any]) -> None:
    """A cache folder that cannot be written to costs nothing but the estimates of the next start."""
    record.settings = settings
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(text)
        partial.replace(path)
    except OSError:
        pass


def _cost(bucket: Bucket) -> int:
    """What memory grows with."""
    return bucket.num_tokens if bucket.phase == "prefill" else bucket.batch + bucket.length


def _describe(bucket: Bucket) -> str:
    if bucket.phase == "prefill":
        return f"{bucket.batch} prompts of {bucket.length} tokens"
    return f"{bucket.batch} requests with {bucket.length} blocks"
