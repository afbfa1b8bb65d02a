"""`FeatureStore`: features of pictures as rows of one tensor, so that every pass reads the same tensor by an index.

Its shape never changes, whatever pictures there are: a graph may read it where it is.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device


class FeatureStore:
    def __init__(self, device: Device, capacity: int, width: int, dtype: torch.dtype) -> None:
        self._device = device
        # The last row is nobody's: padding is written there. Not filled: on a CPU what nobody writes takes no memory.
        with device.stream():
            self.rows = torch.empty((capacity + 1, width), dtype=dtype, device=device.torch_device)
        by_shape = device.ops.by_shape
        self._write_graph = None if by_shape is None else by_shape(self._write, True)
        self._nobodys = capacity
        self._free = np.arange(capacity)[::-1].copy()
        self._num_free = capacity
        self._places: dict[str, np.ndarray] = {}  # by digest: the row of each feature

    def __contains__(self, digest: str) -> bool:
        return digest in self._places

    def places_of(self, digest: str) -> np.ndarray:
        return self._places[digest]

    def take(self, digest: str, count: int) -> np.ndarray:
        """Rows for a picture."""
        assert count <= self._num_free and digest not in self._places, "there is no room for a picture's features"
        places = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._places[digest] = places
        return places

    def drop(self, digest: str) -> bool:
        """False if there is no such picture."""
        places = self._places.pop(digest, None)
        if places is None:
            return False
        self._free[self._num_free : self._num_free + len(places)] = places[::-1]
        self._num_free += len(places)
        return True

    def clear(self) -> None:
        for digest in list(self._places):
            self.drop(digest)

    def check(self, digests: Sequence[str]) -> None:
        """Raise AssertionError unless each row is free or one of these pictures'."""
        assert set(self._places) == set(digests)
        used = np.concatenate([self._free[: self._num_free], *self._places.values()])
        assert sorted(used.tolist()) == list(range(self._nobodys))

    def write(self, places: np.ndarray, features: Tensor) -> None:
        self.rows.index_copy_(0, self._move(places), features.to(self.rows.dtype))

    def write_some(self, places: np.ndarray, sources: np.ndarray, made: Tensor) -> None:
        """Some rows of what a padded pass made, in copies of one shape for each shape of a pass."""
        size = made.shape[0]
        for first in range(0, max(1, len(places)), size):
            about = np.zeros((2, size), dtype=np.int32)  # where to, and where from
            about[0] = self._nobodys
            count = len(places[first : first + size])
            about[:, :count] = places[first : first + size], sources[first : first + size]
            if self._write_graph is not None:
                self._write_graph(made, about)
            else:
                self._write(made, self._move(about))

    def _write(self, made: Tensor, about: Tensor) -> Tensor:
        to, taken = about.long().unbind()
        self.rows.index_copy_(0, to, made.index_select(0, taken))
        return about

    def _move(self, array: np.ndarray) -> Tensor:
        return self._device.send(torch.from_numpy(array))  # pyright: ignore[reportUnknownMemberType]
