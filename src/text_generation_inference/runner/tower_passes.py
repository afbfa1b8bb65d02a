"""Passes of a tower that have sizes of a bucket plan: pieces of pictures are put together, padded, and computed through
the device's graphs where it makes one for each shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.models.vision.padded import PaddedTower, Piece
from text_generation_inference.runner.shapes import Bucket, BucketPlan, ShapeStats
from text_generation_inference.types import PictureSpan


@dataclass(slots=True)
class _Placed:
    """A piece of a picture, and what comes out of it."""

    tensors: Piece
    size: int
    places: np.ndarray  # in the store
    sources: np.ndarray  # among the rows of the piece; -1: the row behind those of the pass


class Store(Protocol):
    """Where features go."""

    def write_some(self, places: np.ndarray, sources: np.ndarray, made: Tensor) -> None:
        """Some rows of what a pass has made, in copies of one shape for each shape of a pass."""
        ...


class TowerPasses:
    def __init__(self, device: Device, tower: PaddedTower, store: Store, plan: BucketPlan) -> None:
        self.plan = plan
        self.stats: ShapeStats | None = None
        self._device, self._tower, self._store = device, tower, store
        self._sizes = [bucket.batch for bucket in plan.pictures]
        by_shape = device.ops.by_shape
        self._has_graphs = device.limits.graphs and by_shape is not None
        self._graphs: Callable[..., Tensor] = tower.run if by_shape is None else by_shape(tower.run)
        self._without: set[Bucket] = set()
        self._makes_graphs = device.ops.graphs_by_shape
        self._captured: set[Bucket] = set()
        tower.get_ready(device.torch_device)

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def captures(self, bucket: Bucket) -> bool:
        return self._has_graphs and bucket not in self._without

    def go_without(self, bucket: Bucket) -> None:
        self._without.add(bucket)

    def hold(self, spans: Sequence[PictureSpan]) -> bool:
        """Whether the plan has sizes for these pictures. If not, they are computed in shapes of their own."""
        largest = max(size for span in spans for size in self._tower.sizes_of(span.shape, span.grid))
        if largest > self._sizes[-1] and self.stats is not None:
            bucket = Bucket("picture", largest, 0)
            self.stats.on_pass(_key(bucket), bucket, largest, self._has_graphs)
        return largest <= self._sizes[-1]

    def warm(self, bucket: Bucket) -> None:
        """Meet a size with a pass that is all padding."""
        made = self._compute(bucket, [])
        nothing = np.zeros(0, dtype=np.int64)
        self._store.write_some(nothing, nothing, made)
        if self.stats is not None:
            self.stats.warmed.add(_key(bucket))

    def encode(self, pixels: Sequence[Tensor], grids: Sequence[tuple[int, ...]], places: Sequence[np.ndarray]) -> None:
        """Features of pictures, whose pixels are on the host, into these rows of the store."""
        pieces = [each for picture in zip(pixels, grids, places, strict=True) for each in self._cut(*picture)]
        for bucket, together in self._group(pieces):
            made = self._compute(bucket, together)
            if self.stats is not None:
                needed = sum(each.size for each in together)
                self.stats.on_pass(_key(bucket), bucket, needed, self._has_graphs and bucket in self._without)
            first, at = 0, list[np.ndarray]()
            for each in together:
                at.append(np.where(each.sources < 0, made.shape[0] - 1, each.sources + first))
                first += self._tower.num_rows(each.size)
            self._store.write_some(np.concatenate([each.places for each in together]), np.concatenate(at), made)

    def _cut(self, pixels: Tensor, grid: tuple[int, ...], places: np.ndarray) -> list[_Placed]:
        tower, found, first = self._tower, list[_Placed](), 0
        order, sizes = tower.order_of(pixels.shape, grid), tower.sizes_of(pixels.shape, grid)
        pieces = tower.pieces_of(pixels, grid)
        for number, (tensors, size) in enumerate(zip(pieces, sizes, strict=True)):
            end = first + tower.num_rows(size)
            own = (order >= first) & (order < end)
            if number == len(pieces) - 1:
                own |= order < 0
            found.append(_Placed(tensors, size, places[own], np.maximum(order[own] - first, -1)))
            first = end
        return found

    def _group(self, pieces: Sequence[_Placed]) -> list[tuple[Bucket, list[_Placed]]]:
        groups: list[list[_Placed]] = []
        left = 0
        for piece in pieces:
            if not groups or not self._tower.shares_passes or piece.size > left:
                groups.append([])
                left = self._sizes[-1]
            groups[-1].append(piece)
            left -= piece.size
        return [(self._find(sum(each.size for each in group)), group) for group in groups]

    def _find(self, size: int) -> Bucket:
        found = self.plan.find("picture", size, 0)
        assert found is not None
        return found

    def _compute(self, bucket: Bucket, pieces: Sequence[_Placed]) -> Tensor:
        inputs: list[Tensor] = []
        for number, blank in enumerate(self._tower.blank()):
            filled = torch.zeros((bucket.batch, *blank.shape[1:]), dtype=blank.dtype)
            if pieces:
                rows = torch.cat([piece.tensors[number] for piece in pieces])
                filled[: len(rows)] = rows
            inputs.append(filled)
        if not self.captures(bucket):
            return self._tower.run(*(each.to(self._device.torch_device) for each in inputs))
        if self._makes_graphs:
            self._captured.add(bucket)
        pixels, *about = inputs  # what is known of them goes together, and towers do not read all of it
        return self._graphs(pixels.to(self._device.torch_device), *(each.numpy() for each in about))


def _key(bucket: Bucket) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("picture", (bucket.batch,)),)
