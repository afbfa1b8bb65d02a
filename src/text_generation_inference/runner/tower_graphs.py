"""Passes of a tower over few pictures as graphs, where the device captures steps: the host takes longer to queue their
ops one by one than the device takes to compute them.

A pass is captured when pictures of the same shapes come again: part by part, each replayed at once, so that whoever
streams waits for a part here too. Captures of towers have memory of their own, since those of steps are replayed
between the parts. They share it with each other, as one pass is under way at a time.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.models.model import Model
from text_generation_inference.models.vision.tower import Parts
from text_generation_inference.runner.shapes import BucketPlan, ShapePlan

POOL = "towers"
# Of a pass. On an H200 a tower of 32 blocks computes as long as its ops are queued at about four pictures of 672x672.
MOST_PIXELS = 3 << 19
MOST_GRAPHS = 8
_MOST_MET = 64
_Shapes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # of the pixels of each picture, and its grid


def captures_towers(device: Device, plan: ShapePlan) -> bool:
    """Whether towers have graphs: where steps have that are not all padded."""
    return not isinstance(plan, BucketPlan) and bool(plan.shapes) and device.limits.max_captured_tokens > 0


@dataclass(frozen=True, slots=True)
class _TowerGraph:
    inputs: list[Tensor]  # pixels, where the graphs read them
    layout: object  # what else they read
    parts: list[Callable[[], None]]
    features: list[Tensor]  # where the last one leaves them


class TowerGraphs:
    def __init__(self, device: Device, model: Model) -> None:
        self._device, self._model = device, model
        self._met: OrderedDict[_Shapes, None] = OrderedDict()  # once, the last of them
        self._graphs: OrderedDict[_Shapes, _TowerGraph] = OrderedDict()  # the one used last is last
        self._captures = True  # not since a capture has failed: it lacked memory
        self._news: list[str] = []

    @property
    def num_captured(self) -> int:
        """Passes."""
        return len(self._graphs)

    def take_news(self) -> list[str]:
        """What whoever runs the server should know, once."""
        news, self._news = self._news, []
        return news

    def forget(self) -> None:
        """No pass may be under way."""
        self._met.clear()
        self._graphs.clear()
        self._device.forget_captures(POOL)

    def encode(self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]]) -> Parts[list[Tensor]]:
        """Features of pictures, whose pixels are on the host. They are good until the next pass begins."""
        shapes = [tuple(picture.shape) for picture in pixels]
        key = tuple(zip(shapes, map(tuple, grids), strict=True))
        if (graph := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            return self._replay(graph, pixels)
        if self._comes_again(key):
            layout = self._model.lay_out_pictures(shapes, grids, self._device.torch_device)
            if layout is not None:
                return self._capture(key, pixels, grids, layout)
        return self._model.encode([self._device.send(each) for each in pixels], grids)

    def _comes_again(self, key: _Shapes) -> bool:
        """Whether shapes that may be captured were met before."""
        if not self._captures or sum(math.prod(shape) // 3 for shape, _ in key) > MOST_PIXELS:
            return False
        is_known = key in self._met
        self._met[key] = None
        self._met.move_to_end(key)
        if len(self._met) > _MOST_MET:
            self._met.popitem(last=False)
        return is_known

    def _replay(self, graph: _TowerGraph, pixels: Sequence[Tensor]) -> Parts[list[Tensor]]:
        for own, picture in zip(graph.inputs, pixels, strict=True):
            own.copy_(self._device.send(picture))
        for part in graph.parts[:-1]:
            part()
            yield
        graph.parts[-1]()
        return graph.features

    def _capture(
        self, key: _Shapes, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], layout: Any
    ) -> Parts[list[Tensor]]:
        self._device.free_bytes()  # gives back what an allocator keeps for later: a capture takes nothing of that
        inputs = [self._device.send(each) for each in pixels]
        parts = self._model.encode(inputs, grids, layout)
        replays: list[Callable[[], None]] = []
        num_done = 0
        try:
            while (features := self._capture_part(parts, replays)) is None:
                num_done += 1
                yield
            self._graphs[key] = _TowerGraph(inputs, layout, replays, features)
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
            return features
        except RuntimeError as error:  # if it is no lack of memory, what follows raises it again
            self._captures = False
            reason = str(error).partition("\n")[0]
            self._news.append(f"passes over pictures run without graphs from here on: capturing one failed: {reason}")
        finally:
            if key not in self._graphs:  # it is left half way, or goes on without
                replays.clear()
                parts.close()
            if not self._graphs:
                self._device.forget_captures(POOL)
        without = self._model.encode(inputs, grids)
        for _ in range(num_done):
            next(without)
        return (yield from without)

    def _capture_part(self, parts: Parts[list[Tensor]], replays: list[Callable[[], None]]) -> list[Tensor] | None:
        replay, features = self._device.capture(partial(_advance, parts), POOL)
        replays.append(replay)
        replay()  # capturing has computed nothing
        return features


def _advance(parts: Parts[list[Tensor]]) -> list[Tensor] | None:
    """By one part. What it comes to, if this was the last."""
    try:
        next(parts)
    except StopIteration as end:
        return end.value
    return None
