"""Memory that loading takes and gives back: parts of a matrix, and what they are widened to while they are quantised.

Between the tensors of a model it would leave holes that nothing large fits into. So where a device has memory in pools
(`Device.loading`) all of it comes from one of its own, which is given back as a whole, and what stays is copied out.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

Pool = Callable[[], AbstractContextManager[Any]]  # inside, this thread allocates from the pool


class Scratch:
    def __init__(self, pool: Pool | None = None, settle: Callable[[], None] | None = None) -> None:
        self._pool = pool
        self._settle = settle  # until the device has what was sent to it: sources stay alive until then

    def __call__(self) -> AbstractContextManager[Any]:
        """What is made inside must be gone soon, or be kept."""
        return nullcontext() if self._pool is None else self._pool()

    def keep(self, value: Any) -> Any:
        """A tensor, or a dataclass of tensors, that was made inside: as one that stays. Called outside."""
        if self._settle is not None:
            self._settle()
        if self._pool is None:
            return value
        if isinstance(value, Tensor):
            return value.clone()
        if is_dataclass(value) and not isinstance(value, type):
            tensors = {field.name: getattr(value, field.name) for field in fields(value)}
            return replace(value, **{name: each.clone() for name, each in tensors.items() if isinstance(each, Tensor)})
        return value
