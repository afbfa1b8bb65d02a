"""The newest token of each request, on a device whose slots are on the host: there the next pass finds it, which is
queued before the host knows it.

A pass of decode rows has places of these tokens for ids. Every pass notes whose its rows are, inside its graph, as that
came with all else that it reads; the choice of tokens that follows puts them there.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import BlockLists


class NewestTokens:
    def __init__(self, device: Device, num_slots: int) -> None:
        self._device, self._padding = device, num_slots
        with device.stream():
            self._tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device.torch_device)  # the last: 0
        self._rows: dict[int, Tensor] = {}  # by how many there are: places of the rows of the last pass
        by_shape = device.ops.by_shape
        self._put = self._put_tokens if by_shape is None else by_shape(self._put_tokens, True)

    def places_of(self, slots: np.ndarray) -> np.ndarray:
        """slots `[rows]`, -1 for padding -> places."""
        return np.where(slots < 0, self._padding, slots)

    def make_room(self, num_rows: int) -> None:
        """Before the first pass of so many rows: a graph makes nothing that stays."""
        if num_rows not in self._rows:
            self._rows[num_rows] = torch.zeros(num_rows, dtype=torch.int64, device=self._device.torch_device)

    def read(self, batch: Batch) -> Batch:
        """Part of a pass: with its ids."""
        places = batch.places
        if isinstance(batch.meta, BlockLists):
            places = batch.input_ids
            batch = replace(batch, input_ids=self._tokens.index_select(0, places))
        assert places is not None
        self._rows[places.shape[0]].copy_(places)
        return batch

    def write(self, found: Tensor) -> None:
        """What was chosen for the rows of the last pass, padding included: `[any number, rows]`, of which the first are
        token ids of any type."""
        self._put(found, self._rows[found.shape[1]])

    def fetch(self, found: Tensor) -> Tensor:
        """On its way to the host: there once the step is done."""
        return self._device.fetch(found)

    def _put_tokens(self, found: Tensor, places: Tensor) -> Tensor:
        chosen = torch.where(places == self._padding, 0, found[0].to(self._tokens.dtype))
        return self._tokens.index_copy_(0, places, chosen)
