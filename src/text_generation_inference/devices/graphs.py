"""Padded passes captured once for each shape and replayed, on a device that can capture what it queues.

Inputs are copied to where the graph reads them; a result stays where the graph leaves it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.devices.device import QueueDevice
from text_generation_inference.kernels.padded import PaddedBatch


@dataclass(slots=True)
class _Graph:
    inputs: list[Tensor]
    replay: Callable[[], None]
    result: Tensor


class CapturedForward:
    """See `device.GraphForward`."""

    def __init__(
        self,
        device: QueueDevice,
        forward: Callable[[PaddedBatch], Tensor],
        first: Callable[[PaddedBatch], object] | None = None,
    ) -> None:
        self._device, self._forward, self._first = device, forward, first or forward
        self._graphs: dict[object, _Graph] = {}

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def __call__(self, batch: PaddedBatch, bypass: bool = False) -> Tensor:
        if bypass:
            return self._forward(batch)
        key = batch.key()
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(batch)
        torch._foreach_copy_(graph.inputs, _present(batch))  # pyright: ignore
        graph.replay()
        return graph.result

    def _capture(self, batch: PaddedBatch) -> _Graph:
        own = PaddedBatch(*(None if tensor is None else tensor.clone() for tensor in batch.tensors()))  # pyright: ignore
        self._first(own)
        replay, result = self._device.capture(lambda: self._forward(own))
        return _Graph(_present(own), replay, result)


def _present(batch: PaddedBatch) -> list[Tensor]:
    return [tensor for tensor in batch.tensors() if tensor is not None]
