"""What a device that runs ahead is to compute goes through its queue, all of it. On the CPU; no GPU is needed."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import make_tiny, run, start
from engine_cases import PARAMS, on_cpu, requests, same
from queue_on_cpu import QueueOnCpu
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from text_generation_inference.devices.cuda import CudaDevice
from text_generation_inference.runner.runner import Runner
from text_generation_inference.types import Admission, Chunk, GenerationRequest, Grammar, SamplingParams, StepPlan

aten = torch.ops.aten


class PinningAnywhere(QueueOnCpu):
    """Memory of the host is nobody's queue's."""

    def pinned_int32(self, count: int) -> torch.Tensor:
        with self.stream():
            return super().pinned_int32(count)


class Watch(TorchDispatchMode):
    """Looks at the ops of this thread."""

    def __init__(self, device: QueueOnCpu) -> None:
        super().__init__()
        self.device = device
        self.strays: list[str] = []  # what did not go through the queue; views are no work
        self.host_reads: list[str] = []  # what a GPU would have to finish for

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.device.in_stream and not func.is_view:
            self.strays.append(str(func))
        indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if by_mask or func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            self.host_reads.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bucketing", [False, True])
def test_steps_go_through_the_queue_and_wait_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucketing: bool
) -> None:
    """A GPU's stream does not wait for what another one fills, nor the host for the stream."""
    tiny = make_tiny("Llama", {}, tmp_path)
    asked = requests(PARAMS)
    device = PinningAnywhere(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
        engine = start(
            tiny.folder, max_batch_size=4, max_input_tokens=96, max_total_tokens=160, bucketing=bucketing or None
        )
    before: Any = engine.rank.runner
    attention = device.ops.attention

    def attend(*arguments: Any, **options: Any) -> Any:  # the definition reads on the host, as faster ones do not
        with _disable_current_modes():
            return attention(*arguments, **options)

    device.ops.attention = attend
    with Watch(device) as watch:
        runner = Runner(device, before.model, before.kv_cache, 4, 160, plan=before.steps.plan)
        for bucket in () if bucketing else runner.steps.plan.shapes:
            runner.steps.warm(bucket)
        watch.host_reads.clear()
        engine.rank.runner = runner
        outputs = run(engine, asked)
        runner.forget()
    engine.close()
    assert (watch.strays, watch.host_reads) == ([], [])
    same(outputs, on_cpu(tiny.folder, asked))


class Noted(CudaDevice):
    """A GPU without kernels, whose stream only notes who is inside."""

    def __init__(self) -> None:
        self._has_kernels = False
        self.in_stream = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.in_stream += 1
        try:
            yield
        finally:
            self.in_stream -= 1


def test_a_failed_step_keeps_nothing() -> None:
    """Its tensors are gone with its future: the step that follows a lack of memory needs theirs."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def queue() -> Any:
        hidden = torch.zeros(8)
        tensors.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("CUDA out of memory")

    gc.disable()
    try:
        step = Noted().launch(queue)
        assert isinstance(step.exception(), torch.OutOfMemoryError) and tensors[0]() is not None
        del step
        assert tensors[0]() is None
    finally:
        gc.enable()


def test_work_that_is_not_captured_goes_through_the_queue_too() -> None:
    device = Noted()
    inside: list[int] = []

    def work() -> torch.Tensor:
        inside.append(device.in_stream)
        return torch.zeros(1)

    replay, _ = device.capture(work)
    with device.stream():  # as steps do
        replay()
    assert inside == [1, 1] and device.in_stream == 0


class ReadsLate(QueueOnCpu):
    """Results of steps are read once the test lets them."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.may_read = threading.Event()
        self.may_read.set()

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> Future[Any]:
        finish = queue()

        def read() -> Any:
            self.may_read.wait()
            return finish()

        return self.submit(read)


@pytest.mark.parametrize(
    ("asked", "waits"),
    [
        ({}, False),
        ({"sampling": SamplingParams(watermark=True)}, True),
        ({"grammar": Grammar("regex", "[0-9]+")}, True),
    ],
)
def test_who_follows_tokens_is_not_told_those_of_the_slot_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], waits: bool
) -> None:
    """A step ahead gives a slot to another request: tokens of the step before may still come for the slot."""
    tiny, device = make_tiny("Llama", {}, tmp_path), ReadsLate(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
        engine = start(tiny.folder, max_batch_size=2, max_input_tokens=32, max_total_tokens=64)
    runner: Any = engine.rank.runner
    held = SamplingParams(min_tokens=5)  # makes masks of a step, though nothing follows tokens
    device.may_read.clear()
    first = runner.launch(plan_one(1, 0, {"sampling": held, "stop_token_ids": [3]}))
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(runner.launch, plan_one(2, 0, asked, release=[0]))
        wait([second], timeout=1 if waits else 60)
        found = second.done(), first.done(), runner.grammars.active
        device.may_read.set()
        second.result().result()
    engine.close()
    assert found == (not waits, False, False), "it waits before the slot is another's"


def plan_one(step: int, slot: int, asked: dict[str, Any], release: Sequence[int] = ()) -> StepPlan:
    """A prompt of three tokens in this slot."""
    fields: dict[str, Any] = {"sampling": SamplingParams(), "stop_token_ids": [], **asked}
    request = GenerationRequest(id=step, token_ids=[5, 6, 7], max_new_tokens=8, seed=0, **fields)
    return StepPlan(
        step,
        release=list(release),
        admit=[Admission(slot, request, [], [step])],
        leave=[],
        join=[],
        grow=[],
        decode=False,
        chunks=[Chunk(slot, 0, 3, True)],
    )
