"""Collectives through memory that all ranks of a machine can read (symmetric memory), and what else carries large ones.

The kernels are the device's; here is which of them a size takes. That is measured once, and rank 0 decides for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.matrices import Rows
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.parallel.collectives import Collectives

_SIZES = tuple(16 << 10 << power for power in range(10))  # 16 KiB to 8 MiB
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)


class PeerKernels(Protocol):
    """Of one device. Tensors are contiguous."""

    def all_reduce(self, x: Tensor, two_shot: bool) -> Tensor:
        """x, which the sum replaces."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """-> `[world, *x.shape]`."""
        ...

    def fits_norm(self, x: Tensor) -> bool:
        """Whether `add_rms_norm` takes it."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, two_shot: bool, quantize_for: Fp8Weight | None
    ) -> tuple[Rows, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Ways:
    """Up to how many bytes a way is the fastest."""

    one_shot_bytes: int
    own_bytes: int | None  # one shot or two; None: at every size, as there is nothing else

    def describe(self, other: str) -> str:
        one, own = self.one_shot_bytes >> 10, None if self.own_bytes is None else self.own_bytes >> 10
        beyond = "beyond" if own is None else f"up to {own} KiB, {other} beyond"
        return f"sums through symmetric memory: one shot up to {one} KiB, two shots {beyond}"


class SymmetricCollectives:
    def __init__(self, kernels: PeerKernels, ways: Ways, other: Collectives | None) -> None:
        self.kernels, self.ways, self._other = kernels, ways, other
        self.description = ways.describe("" if other is None else other.description.removeprefix("sums over "))

    def _takes(self, x: Tensor) -> bool:
        return self._other is None or x.nbytes <= (self.ways.own_bytes or 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._other is not None and not self._takes(x):
            return self._other.all_reduce(x)
        if x.dtype not in _SUMMED:  # few numbers, for the host
            return self.kernels.all_gather(x.contiguous()).sum(0, dtype=x.dtype)
        return self.kernels.all_reduce(x.contiguous(), x.nbytes > self.ways.one_shot_bytes)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        if self._other is not None and not self._takes(x):
            return self._other.all_gather(x)
        return list(self.kernels.all_gather(x.contiguous()).unbind(0))

    def all_reduce_add_rms_norm(
        self, ops: Ops, x: Tensor, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        if self._takes(x) and self.kernels.fits_norm(x):
            two_shot = x.nbytes > self.ways.one_shot_bytes
            return self.kernels.add_rms_norm(x.contiguous(), residual, weight, eps, two_shot, quantize_for)
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps, quantize_for)


def measure_ways(
    kernels: PeerKernels,
    other: Collectives | None,
    microseconds: Callable[[Callable[[], object]], float],
    make: Callable[[int], Tensor],
) -> Ways:
    """`microseconds` that work takes on a device, `make` a tensor there of so many bytes. Every rank measures, as each
    sum needs all of them; what rank 0 has found holds for all."""
    one: list[float] = []
    two: list[float] = []
    others: list[float] = []
    for x in map(make, _SIZES):
        one.append(microseconds(partial(kernels.all_reduce, x, False)))
        two.append(microseconds(partial(kernels.all_reduce, x, True)))
        if other is not None:
            others.append(microseconds(partial(other.all_reduce, x)))
    return agree(choose_ways(_SIZES, one, two, None if other is None else others))


def choose_ways(
    sizes: Sequence[int], one: Sequence[float], two: Sequence[float], others: Sequence[float] | None
) -> Ways:
    """From what sums of these sizes take."""
    best = [min(pair) for pair in zip(one, two, strict=True)]
    one_shot = _last_faster(sizes, one, two)
    return Ways(one_shot, None if others is None else max(one_shot, _last_faster(sizes, best, others)))


def _last_faster(sizes: Sequence[int], these: Sequence[float], those: Sequence[float]) -> int:
    """The size up to which these take no longer than those."""
    last = sizes[0]  # small ones are what this is for
    for size, this, that in zip(sizes, these, those, strict=True):
        if this > that:
            break
        last = size
    return last


def agree(ways: Ways) -> Ways:
    """As rank 0 has it."""
    said = torch.tensor([ways.one_shot_bytes, -1 if ways.own_bytes is None else ways.own_bytes])
    dist.broadcast(said, 0)  # pyright: ignore[reportUnknownMemberType]
    one_shot, own = (int(number) for number in said)
    return Ways(one_shot, None if own < 0 else own)
