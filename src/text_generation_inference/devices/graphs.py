"""Padded passes captured once for each shape and replayed, on a device that can capture what it queues.

Inputs are copied to where the graph reads them, but for those that live as long as it does (`LONG_LIVED`); a result
stays where the graph leaves it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import LONG_LIVED, key_of, put_together, take_apart


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
        given = [tensor for name, tensor in take_apart(batch).items() if name not in LONG_LIVED]
        torch._foreach_copy_(graph.inputs, given)  # pyright: ignore
        graph.replay()
        return graph.result

    def _capture(self, batch: Batch) -> _Graph:
        given = take_apart(batch)
        inputs = {name: tensor.clone() for name, tensor in given.items() if name not in LONG_LIVED}
        own = put_together({**given, **inputs})
        self._first(own)
        replay, result = self._device.capture(lambda: self._forward(own))
        return _Graph(list(inputs.values()), replay, result)
