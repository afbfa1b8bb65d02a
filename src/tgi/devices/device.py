"""What the engine asks of a device, and which one to use.

Level 1. A device is one file beside this one. Everything above works with `Device` and `Ops` and never hears a device's
name.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from tgi.errors import StartError
from tgi.kernels import reference
from tgi.types import Limits


class Ops:
    """The kernels of a device, by name: the reference ops, with faster ones in their place where there are any."""

    def __init__(self, description: str = "reference ops", **faster: Any) -> None:
        self.description = description
        self.pack_linear: Callable[..., Any] = reference.pack_linear
        self.pack_blocks: Callable[..., Any] = _no_blocks
        self.block_kinds: frozenset[str] = frozenset()  # quantised blocks that `pack_blocks` takes
        self.linear: Callable[..., Any] = reference.linear
        self.embedding: Callable[..., Any] = reference.embedding
        self.rms_norm: Callable[..., Any] = reference.rms_norm
        self.add_rms_norm: Callable[..., Any] = reference.add_rms_norm
        self.silu_mul: Callable[..., Any] = reference.silu_mul
        self.gelu_tanh_mul: Callable[..., Any] = reference.gelu_tanh_mul
        self.rotary_and_cache: Callable[..., Any] = reference.rotary_and_cache
        self.attention: Callable[..., Any] = reference.attention
        self.greedy: Callable[..., Any] = reference.greedy
        self.make_stack: Callable[..., Any] | None = None  # see `kernels.stack`
        self.run_stack: Callable[..., Any] | None = None
        for name, op in faster.items():
            assert hasattr(self, name), f"{name} is not an op"
            setattr(self, name, op)


def _no_blocks(kind: str, data: torch.Tensor, in_features: int) -> object:
    raise AssertionError("this device does not compute from quantised blocks")


class Device(Protocol):
    name: str
    torch_device: torch.device
    limits: Limits
    comm_backend: str

    @property
    def ops(self) -> Ops: ...

    def free_bytes(self) -> int:
        """Memory that a KV cache could take now."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A large long-lived buffer."""
        ...

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run work in order after what was submitted before, without waiting for it."""
        ...

    def close(self) -> None: ...


def choose_device(name: str, cache_dir: Path, custom_kernels: bool, num_threads: int | None) -> Device:
    """The device asked for; "auto" takes the fastest one present."""
    from tgi.devices.cpu import CpuDevice  # a device's libraries load only when it is chosen

    known: Sequence[str] = ("auto", "cpu")
    if name not in known:
        raise StartError(f"`device` must be one of {', '.join(known)}. Given: {name}")
    return CpuDevice(cache_dir, custom_kernels, num_threads)
