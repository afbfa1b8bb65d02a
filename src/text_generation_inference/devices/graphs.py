"""Padded passes captured once for each shape and replayed, on a device that can capture what it queues.

Inputs are copied to where the graph reads them; a result stays where the graph leaves it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import key_of, put_together, take_apart


@dataclass(slots=True)
class _Graph:
    inputs: list[Tensor]
    replay: Callable[[], None]
    result: Tensor


class CapturedForward:
    """See `device.GraphForward`."""

    def __init__(
        self,
        device: Device,
        forward: Callable[[Batch], Tensor],
        first: Callable[[Batch], object] | None = None,
    ) -> None:
        self._device, self._forward, self._first = device, forward, first or forward
        self._graphs: dict[object, _Graph] = {}

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def __call__(self, batch: Batch, bypass: bool = False) -> Tensor:
        if bypass:
            return self._forward(batch)
        key = key_of(batch)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(batch)
        torch._foreach_copy_(graph.inputs, list(take_apart(batch).values()))  # pyright: ignore
        graph.replay()
        return graph.result

    def _capture(self, batch: Batch) -> _Graph:
        own = put_together({name: tensor.clone() for name, tensor in take_apart(batch).items()})
        self._first(own)
        replay, result = self._device.capture(lambda: self._forward(own))
        return _Graph(list(take_apart(own).values()), replay, result)
