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


class _Words:
    """Of one step. What most steps fetch has the same few sizes: views of it are made once."""

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self._by_size: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def tokens(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Words `[2, size]`; of them the ids, and the log-probabilities."""
        found = self._by_size.get(size)
        if found is None:
            both = self.words[: 2 * size].view(2, size)
            found = self._by_size[size] = (both, both[0], both[1].view(torch.float32))
        return found


class ResultWords:
    def __init__(self, device: Device, num_slots: int) -> None:
        self._device = device
        self._words = [_Words(device.pinned_int32(2 * num_slots)) for _ in range(_NUM_RESULTS)]
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
        size = out.shape[1]
        count = 2 * size + (tops.numel() if tops is not None else 0)
        if self._words[self._next].words.shape[0] < count:
            self._words[self._next] = _Words(self._device.pinned_int32(2 * count))
        found = self._words[self._next]
        words, token_ids, logprobs = found.tokens(size)
        words.copy_(out, non_blocking=True)
        if num_rows < size:
            token_ids, logprobs = token_ids[:num_rows], logprobs[:num_rows]
        if tops is None:
            return SampledTokens(token_ids, logprobs)
        best = found.words[2 * size : count].view(tops.shape)
        best.copy_(tops, non_blocking=True)
        room = tops.shape[1] // 2
        counts, ids, bits = best[:, 0], best[:, 1 : 1 + room], best[:, 1 + room :]
        return SampledTokens(token_ids, logprobs, BestIds(top_rows, top_limits, counts, ids, bits.view(torch.float32)))

    def read_by(self, reader: "Future[StepResult]") -> None:
        """Whose end frees the words that were fetched since the last call, if any."""
        if self._fetched:
            self._fetched = False
            self._readers[self._next] = reader
            self._next = (self._next + 1) % _NUM_RESULTS
