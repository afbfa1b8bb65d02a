"""`torch.hpu`. Without lazy mode it has no graphs."""

from contextlib import contextmanager
from typing import Any

import torch

from habana_frameworks.torch._card import card
from habana_frameworks.torch._emulation import GENERATION, LAZY, books
from habana_frameworks.torch.hpu import metrics, random  # noqa: F401
from habana_frameworks.torch.hpu.memory import (  # noqa: F401
    max_memory_allocated,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
)

if LAZY:
    from habana_frameworks.torch.hpu.graphs import HPUGraph, graph, wrap_in_hpu_graph  # noqa: F401


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    _check(device)


def get_device_name(device: Any = None) -> str:
    _check(device)
    return GENERATION.upper()


def get_device_capability(device: Any = None) -> str:
    _check(device)
    return "1.22.0"


def _check(device: Any) -> None:
    if device not in (None, 0, "hpu", "hpu:0", torch.device("hpu"), torch.device("hpu", 0)):
        raise AssertionError("Invalid device id")


def synchronize() -> None:
    if books.capturing:
        raise RuntimeError("synchronize while a graph is captured")
    card.settle()


def _lazy_init() -> None:
    """Called by torch before the first tensor."""


def is_initialized() -> bool:
    return True


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device

    def synchronize(self) -> None:
        synchronize()

    def wait_stream(self, stream: "Stream") -> None:
        assert isinstance(stream, Stream)

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._mark: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)
        if books.capturing:
            raise RuntimeError("an event while a graph is captured")
        self._mark = card.mark()

    def synchronize(self) -> None:
        """On any thread."""
        if self._mark is not None:
            card.wait(self._mark)

    def query(self) -> bool:
        return True


_default_stream = Stream()


def default_stream(device: Any = None) -> Stream:
    return _default_stream


def current_stream(device: Any = None) -> Stream:
    return _default_stream


@contextmanager
def stream(stream: Stream):
    assert isinstance(stream, Stream)
    yield


@contextmanager
def sdp_kernel(enable_recompute: bool):
    before, books.recompute = books.recompute, enable_recompute
    yield
    books.recompute = before


def recompute_sdp_enabled() -> bool:
    return books.recompute


def enable_const_section_serialization(path: str, clear: bool, compress: bool) -> None:
    assert isinstance(path, str) and isinstance(clear, bool) and isinstance(compress, bool)
