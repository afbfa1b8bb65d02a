"""Masks: ids that may not come next, because of a grammar or because it is too early for an end."""

import math
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from text_generation_inference.sampling.bits import spread
from text_generation_inference.sampling.vocabulary import VocabularyPart


@dataclass(slots=True)
class RowMasks:
    """The constrained rows of a step, and those that cannot go on."""

    rows: list[int]
    allowed: np.ndarray  # [constrained, words] int32: bit i of word j is id 32 j + i
    errors: dict[int, str]  # by row

    def of(self, vocabulary: VocabularyPart) -> "RowMasks":
        """With the ids of this part alone."""
        return self if vocabulary.is_whole else replace(self, allowed=vocabulary.cut(self.allowed))

    def for_all(self, num_rows: int, num_words: int) -> np.ndarray:
        """`[num_rows, num_words]`: a row without a mask may have everything."""
        allowed = np.full((num_rows, num_words), -1, dtype=np.int32)
        allowed[self.rows] = self.allowed[:, :num_words]
        return allowed


def allow_only(scores: Tensor, allowed: Tensor) -> Tensor:
    """In place: drop what is not among allowed `[rows, words]` int32. NaN stays NaN."""
    return scores.add_(spread(allowed, -math.inf, 0.0, scores.shape[1]))
