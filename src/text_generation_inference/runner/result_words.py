"""Words on the host for what steps sampled.

Several steps may be under way: each has words of its own on the host, which are taken again only once they are
read.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.sampling.sampled_tokens import BestIds, SampledTokens
from text_generation_inference.types import StepResult

_NUM_RESULTS = 4  # steps whose tokens may be on their way


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
        tops: Tensor | None = None,  # see `choice.Tops.out`
    ) -> SampledTokens:
        """Queue the copies of what was sampled for the first `num_rows` of `out`, and of their best ids."""
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
        best = None
        if tops is not None:
            room = tops.shape[1] // 2
            counts, ids, bits = found[1][:, 0], found[1][:, 1 : 1 + room], found[1][:, 1 + room :]
            best = BestIds(top_rows, top_limits, counts, ids, bits.view(torch.float32))
        return SampledTokens(found[0][0, :num_rows], found[0][1, :num_rows].view(torch.float32), best)

    def read_by(self, reader: "Future[StepResult]") -> None:
        """Whose end frees the words that were fetched since the last call, if any."""
        if self._fetched:
            self._fetched = False
            self._readers[self._next] = reader
            self._next = (self._next + 1) % _NUM_RESULTS
