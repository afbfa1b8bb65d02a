"""The ops of a device that sampling uses. `kernels.ops` has them among all others."""

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class GreedyOp(Protocol):
    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits `[rows, vocab]` float32 -> best token `[rows]` int64 and its log-probability `[rows]`."""
        ...


class ByShapeOp(Protocol):
    def __call__(self, function: Callable[..., Result], keeps: bool = False) -> Callable[..., Result]:
        """A function of tensors alone -> the same, through a graph for each shape. A result is good until the next
        call. The last arguments may be arrays of the host (int32, float32, bool), which are sent together. `keeps`:
        the function never overwrites its first tensor."""
        ...


class SamplerOps(Protocol):
    @property
    def greedy(self) -> GreedyOp: ...

    @property
    def by_shape(self) -> ByShapeOp | None: ...


class TokenKeeper(Protocol):
    """Keeps what was chosen on the device, for the next pass: the host has it when the step is done, not before."""

    def write(self, found: Tensor) -> None:
        """found `[any number, rows]`: first the ids of all rows of the logits."""
        ...

    def fetch(self, found: Tensor) -> Tensor:
        """On its way to the host."""
        ...
