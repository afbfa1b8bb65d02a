"""Watermark: the last token says which ids are green, and those are favoured."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from text_generation_inference.sampling.bits import pack, spread
from text_generation_inference.sampling.parts import Arrays, KnownTokens
from text_generation_inference.sampling.vocabulary import VocabularyPart
from text_generation_inference.types import Admission, SamplingParams

_GREEN_LIST_KEY = 15485863


@lru_cache(maxsize=256)
def green_list(last_token: int, vocab_size: int, gamma: float) -> np.ndarray:
    """The ids that the last token makes green, a share `gamma` of all, as bits in int32 words."""
    generator = torch.Generator().manual_seed(_GREEN_LIST_KEY * last_token)
    is_green = np.zeros(vocab_size, dtype=bool)
    is_green[torch.randperm(vocab_size, generator=generator)[: int(vocab_size * gamma)].numpy()] = True
    return pack(is_green)


def favour(scores: Tensor, green: Tensor, delta: float) -> Tensor:
    """In place: add delta to the scores of green ids. green `[rows, words]` int32; no bit is set for other rows."""
    return scores.add_(spread(green, 0.0, delta, scores.shape[1]))


class Watermark:
    def __init__(self, known: KnownTokens, vocabulary: VocabularyPart, gamma: float, delta: float) -> None:
        self._known, self._vocabulary = known, vocabulary
        self._gamma, self._delta = gamma, delta
        self._is_marked = np.zeros(known.num_slots + 1, dtype=bool)  # by slot; the last one is padding

    def asks(self, params: SamplingParams) -> bool:
        return params.watermark

    def admit(self, admission: Admission) -> None:
        self._is_marked[admission.slot] = admission.request.sampling.watermark

    def keep(self, slots: np.ndarray) -> Arrays:
        return []

    def step(self, slots: np.ndarray) -> Arrays:
        green = self._nothing(len(slots))
        for row in np.flatnonzero(self._is_marked[slots]):
            words = green_list(int(self._known.last[slots[row]]), self._vocabulary.size, self._gamma)
            green[row] = self._vocabulary.cut(words)
        return [green]

    def shapes(self, num_rows: int) -> Iterator[Arrays]:
        yield [self._nothing(num_rows)]

    def apply(self, scores: Tensor, green: Tensor) -> Tensor:
        return favour(scores, green, self._delta)

    def _nothing(self, num_rows: int) -> np.ndarray:
        return np.zeros((num_rows, -(-self._vocabulary.width // 32)), dtype=np.int32)
