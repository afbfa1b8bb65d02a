"""Steps on the worker thread of a device that computes when it is told, and whoever plans beside it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from text_generation_inference.devices import at_once
from text_generation_inference.devices.at_once import AtOnce
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.kernels.cpu.ops import load_ops

LONG = 10.0  # seconds: only a fault takes as long


class Step:
    """Prepares until it is let go on, notes that it computes, and computes until it is let end."""

    def __init__(self, device: AtOnce, notes: bool = True) -> None:
        self.device, self.notes = device, notes
        self.prepared, self.computed = threading.Event(), threading.Event()

    def __call__(self) -> Callable[[], Any]:
        assert self.prepared.wait(LONG)
        if self.notes:
            self.device.note_computing()
        assert self.computed.wait(LONG)
        return lambda: 7


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(at_once, "MOST_SECONDS", LONG)
    made = AtOnce("test")
    made.tells_computing = True
    yield made
    made.close()


def is_computing(device: AtOnce, step: Any, seconds: float = LONG) -> bool:
    """Whether the wait ended in time."""
    done = threading.Event()
    threading.Thread(target=lambda: (device.wait_until_computing(step), done.set()), daemon=True).start()
    return done.wait(seconds)


def test_waiting_ends_when_the_step_computes(device: AtOnce) -> None:
    first, second = Step(device), Step(device)
    steps = [device.launch(first), device.launch(second)]
    assert not is_computing(device, steps[0], 0.05)
    first.prepared.set()
    assert is_computing(device, steps[0])
    assert not is_computing(device, steps[1], 0.05)
    first.computed.set()
    assert steps[0].result(LONG) == 7
    assert not is_computing(device, steps[1], 0.05)
    second.prepared.set()
    assert is_computing(device, steps[1]) and not steps[1].done()
    second.computed.set()
    assert steps[1].result(LONG) == 7
    assert is_computing(device, steps[1])


def test_waiting_ends_with_a_step_that_tells_nothing_or_fails(device: AtOnce) -> None:
    silent = Step(device, notes=False)
    step = device.launch(silent)
    silent.prepared.set()
    assert not is_computing(device, step, 0.05)
    silent.computed.set()
    assert is_computing(device, step)

    def fail() -> Callable[[], Any]:
        raise ValueError("no")

    step = device.launch(fail)
    assert is_computing(device, step)
    assert isinstance(step.exception(LONG), ValueError)


def test_nobody_waits_long(device: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "MOST_SECONDS", 0.02)
    silent = Step(device, notes=False)
    step = device.launch(silent)
    assert is_computing(device, step) and not step.done()
    silent.prepared.set()
    silent.computed.set()
    assert step.result(LONG) == 7


def test_ops_that_tell_nothing_are_not_waited_for(device: AtOnce) -> None:
    device.tells_computing = False
    silent = Step(device, notes=False)
    step = device.launch(silent)
    assert is_computing(device, step)
    silent.prepared.set()
    silent.computed.set()
    assert step.result(LONG) == 7


def test_native_kernels_tell_when_they_compute(tmp_path: Path, cache_dir: Path) -> None:
    if isinstance(load_ops(cache_dir), str):
        pytest.skip("there are no native kernels here")
    assert CpuDevice(cache_dir).tells_computing
    assert not CpuDevice(tmp_path, custom_kernels=False).tells_computing
