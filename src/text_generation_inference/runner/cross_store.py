"""`CrossStore`: where a tower's padded passes leave pictures that layers of cross-attention read, as keys and values in
their blocks.

All that a pass has made is written by one op of one shape: rows of a picture in their places, zeros behind the last row
of its group, and zeros for whatever is left in block 0, which nobody owns.
"""

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.models.model import Caches, Model


class CrossStore:
    def __init__(self, device: Device, model: Model, caches: Caches, block_size: int) -> None:
        self._device, self._model, self._caches, self._block_size = device, model, caches, block_size
        by_shape = device.ops.by_shape
        self._write_graph = None if by_shape is None else by_shape(self._write, True)
        self.behind = np.zeros(0, dtype=np.int64)  # places of the group that is being computed, behind its last row

    def write_some(self, places: np.ndarray, sources: np.ndarray, made: Tensor) -> None:
        """`places`: blocks times their size, and places in them. The last row that a pass makes is zeros: it makes
        zeros of keys and values."""
        count, end, last = len(places), len(places) + len(self.behind), made.shape[0] - 1
        about = np.zeros((3, last + self._block_size), dtype=np.int32)  # where from, blocks, places in them
        about[0] = last
        about[0, :count] = sources
        to = np.concatenate((places, self.behind))
        about[1, :end], about[2, :end] = to // self._block_size, to % self._block_size
        if self._write_graph is not None:
            self._write_graph(made, about)
        else:
            self._write(made, self._device.send(torch.from_numpy(about)))  # pyright: ignore[reportUnknownMemberType]

    def _write(self, made: Tensor, about: Tensor) -> Tensor:
        taken, blocks, inside = about.long().unbind()
        self._model.keep_pictures(made.index_select(0, taken), blocks, inside, self._caches)
        return about
