"""Meets every shape of a plan before the first request, in the plan's order, within the memory there is.

Where every pass is padded, the memory of each shape is predicted from those before it: one whose graph would not fit
goes without a graph, and one that would not fit at all ends the start with a report of how far it came, instead of a
failure of the device. Captured steps share the memory of the first one, which was measured. A shape for whose graph the
device lacks memory all the same goes without.
"""

import hashlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from text_generation_inference.config import Resolved, ServerConfig
from text_generation_inference.devices.device import Device
from text_generation_inference.devices.lack_of_memory import is_out_of_memory
from text_generation_inference.errors import ResourceError
from text_generation_inference.runner.shapes import Bucket, ShapePlan, warms_up
from text_generation_inference.runner.warm.record import (
    WarmedShape,
    WarmRecord,
    read_record,
    record_path,
    write_record,
)
from text_generation_inference.units import gigabytes
from text_generation_inference.version import __version__
from text_generation_inference.weights.progress import Progress, silent

STAGE = "warm up shapes"
_SETTINGS = ("dtype", "quantize", "kv_cache_dtype", "custom_kernels", "num_shard")
_LIMITS = ("max_input_tokens", "max_total_tokens", "max_batch_size", "max_batch_prefill_tokens", "num_blocks")


class WarmableSteps(Protocol):
    @property
    def plan(self) -> ShapePlan: ...

    @property
    def num_captured(self) -> int: ...

    def captures(self, bucket: Bucket) -> bool:
        """Whether a shape has, or will have, a graph."""
        ...

    def go_without(self, bucket: Bucket) -> None:
        """No graph for this shape."""
        ...

    def warm(self, bucket: Bucket, scored: bool = False) -> None:
        """Meet a shape; `scored`: as a prompt too whose log-probabilities are asked for."""
        ...


class Meter(Protocol):
    """How memory is measured."""

    def free(self) -> int: ...

    def used_by(self, work: Callable[[], object], /) -> int:
        """Do it; the memory it took, for a while or for good."""
        ...


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
    meter: Meter | None = None  # None: memory is not looked at
    progress: Progress = silent
    before: WarmRecord | None = None  # of an earlier start
    reserve: int = 0  # bytes that steps without a graph take, which graphs leave alone
    score: bool = True  # prompts too whose log-probabilities are asked for
    shapes: list[WarmedShape] = field(default_factory=list)
    minimum: Callable[[int], int] = int  # over ranks: all of them go without the same graphs
    num_lacking: int = 0  # shapes for whose graphs some device had no memory, whatever was predicted
    _predictions: dict[tuple[str, bool, bool, bool], Prediction] = field(default_factory=dict)

    def run(self) -> None:
        """Raises `ResourceError` if memory does not suffice."""
        plan = self.steps.plan
        order = plan.shapes
        known = {shape.bucket: shape for shape in self.before.shapes} if self.before else {}
        weights = [1] * len(order)
        if all(bucket in known for bucket in order):
            weights = [max(1, int(1000 * known[bucket].seconds)) for bucket in order]
        alone: set[Bucket | None] = set()
        if self.score:
            # What is scored is not found in the cache: it follows cached tokens only as a part of a longer prompt.
            alone = {
                plan.find("prefill", 1, bucket.length, bucket.context, bucket.pictures)
                for bucket in order
                if bucket.phase == "prefill" and (plan.cuts or not bucket.context)
            }
        done = 0
        self.progress(STAGE, 0, sum(weights))
        for bucket, weight in zip(order, weights, strict=True):
            earlier = known.get(bucket)
            self.shapes.append(self._warm(bucket, bucket in alone, earlier.num_bytes if earlier else 0))
            done += weight
            self.progress(STAGE, done, sum(weights))

    def _warm(self, bucket: Bucket, scored: bool, known_bytes: int) -> WarmedShape:
        started = time.perf_counter()
        if self.meter is not None:
            self._make_room(bucket, known_bytes, self.meter)
        num_bytes = self._meet(bucket, scored)
        seconds = round(time.perf_counter() - started, 4)
        captured = self.steps.captures(bucket)
        shape = (bucket.phase, bucket.batch, bucket.length, bucket.context, bucket.contiguous, bucket.pictures)
        return WarmedShape(*shape, seconds, num_bytes, captured)

    def _make_room(self, bucket: Bucket, known_bytes: int, meter: Meter) -> None:
        """Go without a graph, or not at all, if what the shape is predicted to take is more than there is."""
        free = self.minimum(meter.free())
        captured = self.steps.captures(bucket)
        needed = self._most(max(known_bytes, self._prediction(bucket).predict(bucket.cost)))
        if captured and needed > free - self.reserve:
            self.steps.go_without(bucket)
            captured = False
            prediction = self._prediction(bucket)
            if prediction.first is not None:  # else it takes for a while what its graph would keep
                needed = self._most(max(known_bytes, prediction.predict(bucket.cost)))
        if not captured and needed > free:
            raise ResourceError(self._report(bucket, needed, free))

    def _most(self, num_bytes: int) -> int:
        """That any rank says."""
        return -self.minimum(-num_bytes)

    def _meet(self, bucket: Bucket, scored: bool) -> int:
        """The memory it took; 0: not measured. Without a graph if a device lacks memory for one."""
        num_bytes, lacked = 0, False
        try:
            num_bytes = self._measure(bucket, scored)
            if self.meter is not None:
                self.meter.free()  # waits for the device, which may say only now that memory lacked
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            lacked = True
            traceback.clear_frames(error.__traceback__)  # its variables hold tensors
        if not self._most(lacked):
            return num_bytes
        if not self.steps.captures(bucket):
            free = self.meter.free() if self.meter is not None else 0
            raise ResourceError(self._report(bucket, 0, free))
        self.steps.go_without(bucket)
        self.num_lacking += 1
        return self._meet(bucket, scored)

    def _measure(self, bucket: Bucket, scored: bool) -> int:
        prediction = self._prediction(bucket)
        if self.meter is None or bucket.cost < 2 * prediction.cost:  # it is little larger than a known one
            self.steps.warm(bucket, scored)
            return 0
        num_bytes = self.meter.used_by(lambda: self.steps.warm(bucket, scored))
        prediction.add(bucket.cost, num_bytes)
        return num_bytes

    def _prediction(self, bucket: Bucket) -> Prediction:
        kind = (bucket.phase, bucket.context > 0, bucket.pictures > 0, self.steps.captures(bucket))
        return self._predictions.setdefault(kind, Prediction())

    def _report(self, bucket: Bucket, needed: int, free: int) -> str:
        last = f", the last one {self.shapes[-1].bucket}" if self.shapes else ""
        by_phase = {"prefill": "`max_batch_prefill_tokens` or `max_input_tokens`", "picture": "`max_input_tokens`"}
        lower = "`max_images_per_request`" if bucket.pictures > 1 else by_phase.get(bucket.phase, "`max_batch_size`")
        amount = f"about {gigabytes(needed)}" if needed else "more memory than there is"
        return (
            f"Warm-up stopped before {bucket}: it needs {amount}, {gigabytes(free)} are free. Warm are"
            f" {len(self.shapes)} of {len(self.steps.plan.shapes)} shapes{last}. Lower {lower}, or give the KV cache"
            " less: `max_batch_total_tokens`."
        )

    @property
    def record(self) -> WarmRecord:
        seconds = sum(shape.seconds for shape in self.shapes)
        return WarmRecord(__version__, {}, round(seconds, 3), self.steps.num_captured, self.shapes)


def warm_up(
    config: ServerConfig,
    resolved: Resolved,
    device: Device,
    steps: WarmableSteps,
    model_id: str,
    cache_dir: Path,
    progress: Progress,
    reserve: int = 0,  # see `WarmUp`
    minimum: Callable[[int], int] = int,  # likewise
) -> int:
    """How many shapes have no graph because memory lacked.

    Padded passes can be met when they are needed: they are left out where the user says so.
    """
    plan = steps.plan
    if not plan.shapes or (plan.pads and not warms_up(config)):
        return 0
    settings: dict[str, Any] = {
        "model_id": model_id,
        "device": device.name,
        **{name: getattr(config, name) for name in _SETTINGS},
        "limits": [getattr(resolved, name) for name in _LIMITS],
        "plan": hashlib.sha256(repr(plan.shapes).encode()).hexdigest()[:16],
    }
    path = record_path(cache_dir, settings)
    meter = choose_meter(device) if plan.pads else None
    work = WarmUp(steps, meter, progress, read_record(path), reserve + device.runtime_bytes, minimum=minimum)
    work.run()
    write_record(path, work.record, settings)
    return work.num_lacking


def choose_meter(device: Device) -> Meter | None:
    """Memory is looked at where steps have it for themselves."""
    return _PeakMeter(device.all_free_bytes, device.peak_bytes) if device.limits.meters_memory else None


@dataclass
class _PeakMeter:
    free: Callable[[], int]
    used_by: Callable[[Callable[[], object]], int]
