"""What steps chose, on its way from the device to the host.

Several steps may be under way: each has words of its own on the host, which are taken again only once they are
read.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.types import StepResult, TopTokens

_NUM_RESULTS = 4  # steps whose tokens may be on their way


@dataclass(slots=True)
class Chosen:
    """What the host reads once the step is done."""

    words: Tensor  # [2, rows] int32 on the host: ids, bits of logprobs
    top_rows: Sequence[int]
    top_limits: Sequence[int]  # how many ids each of them reports at most
    tops: Tensor | None  # [top_rows, 1 + 2 * room] int32 on the host, see `slot_state.Tops.out`

    def read_tokens(self) -> tuple[list[int], list[float]]:
        words = self.words.numpy()
        return words[0].tolist(), words[1].view(np.float32).tolist()

    def read_tops(self) -> list[TopTokens]:
        if self.tops is None:
            return []
        words = self.tops.numpy()
        room = words.shape[1] // 2
        result: list[TopTokens] = []
        for row, limit, found in zip(self.top_rows, self.top_limits, words, strict=True):
            count = min(int(found[0]), limit)  # the room is that of the row that asks for most
            values = found[1 + room :].view(np.float32)
            result.append(TopTokens(row, found[1 : 1 + count].tolist(), values[:count].tolist()))
        return result


class ResultWords:
    def __init__(self, device: Device, num_slots: int) -> None:
        self._device = device
        self._words = [device.pinned_int32(2 * num_slots) for _ in range(_NUM_RESULTS)]
        self._readers: list[Future[StepResult] | None] = [None] * _NUM_RESULTS
        self._next = 0
        self._fetched = False

    def fetch(
        self,
        out: Tensor,
        num_rows: int,
        top_rows: Sequence[int] = (),
        top_limits: Sequence[int] = (),
        tops: Tensor | None = None,
    ) -> Chosen:
        """Queue the copies of what was chosen for the first `num_rows` of `out`, and of their best ids."""
        reader = self._readers[self._next]
        if reader is not None:
            wait([reader])
        self._fetched = True
        parts = [out] if tops is None else [out, tops]
        count = sum(part.numel() for part in parts)
        if self._words[self._next].shape[0] < count:
            self._words[self._next] = self._device.pinned_int32(2 * count)
        found: list[Tensor] = []
        first = 0
        for part in parts:
            words = self._words[self._next][first : first + part.numel()].view(part.shape)
            words.copy_(part, non_blocking=True)
            found.append(words)
            first += part.numel()
        return Chosen(found[0][:, :num_rows], top_rows, top_limits, found[1] if tops is not None else None)

    def read_by(self, reader: "Future[StepResult]") -> None:
        """Whose end frees the words that were fetched since the last call, if any."""
        if self._fetched:
            self._fetched = False
            self._readers[self._next] = reader
            self._next = (self._next + 1) % _NUM_RESULTS
