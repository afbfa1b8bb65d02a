"""Vocabularies that are split over ranks: whose ids are which, and the choice from parts of a row.

A choice is the best of score + noise, and the noise of an id follows from seed, position and id: the choice from all
ids is the best of those from the parts. So for each row ranks tell each other five numbers (`look`) in place of their
scores, and each of them finds the same token (`join`). Equals fall to the lowest id, which the lowest rank has; what is
not a number on one rank spoils the row on all. What depends on the order of all ids (filters, the best ids) needs the
row itself: `gather`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.sampling.bits import cut
from text_generation_inference.sampling.tops import best_ids

COLUMNS = 5  # of what `look` finds


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The ids `start` to `end` of a vocabulary, whose scores this rank has."""

    size: int  # of the whole vocabulary
    start: int
    end: int
    most: int  # ids of a rank; the last one may have fewer
    exchange: Callable[[Tensor], Tensor] | None = None
    """What all ranks have, side by side in the last dimension, in the order of ranks; None: one has all."""

    @classmethod
    def whole(cls, size: int) -> "VocabularyPart":
        return cls(size, 0, size, size)

    @classmethod
    def of_rank(cls, size: int, rank: int, world: int, exchange: Callable[[Tensor], Tensor]) -> "VocabularyPart":
        if world == 1:
            return cls.whole(size)
        most = -(-size // world)
        return cls(size, min(size, rank * most), min(size, (rank + 1) * most), most, exchange)

    @property
    def is_whole(self) -> bool:
        return self.exchange is None

    @property
    def width(self) -> int:
        return self.end - self.start

    def gather(self, scores: Tensor) -> Tensor:
        """`[rows, width]` -> `[rows, size]`."""
        if self.exchange is None:
            return scores
        if self.width < self.most:
            scores = F.pad(scores, (0, self.most - self.width))
        return self.exchange(scores)[:, : self.size]

    def cut(self, words: np.ndarray) -> np.ndarray:
        """Of sets of ids, as bits `[..., words]`, those of this part."""
        return words if self.is_whole else cut(words, self.start, self.end)

    def own(self, ids: Tensor) -> Tensor:
        """Places of ids in this part; `width` for the ids of others."""
        own = ids - self.start
        return torch.where((own >= 0) & (own < self.width), own, self.width)

    def choose(self, scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of a split vocabulary: see `look` and `join`."""
        assert self.exchange is not None
        return join(self.exchange(look(scores, values, self.start)))

    def score(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities of an id in each row `[rows]`, from this rank's scores `[rows, width]`."""
        totals = scores.logsumexp(dim=-1)
        if self.exchange is None:
            return scores.gather(1, ids[:, None])[:, 0] - totals
        own = self.own(ids)
        found = scores.gather(1, own.clamp(max=self.width - 1)[:, None])[:, 0]
        found = torch.where(own < self.width, found, -math.inf)
        parts = self.exchange(torch.stack((totals, found), dim=-1)).view(ids.shape[0], -1, 2)
        return parts[:, :, 1].amax(dim=-1) - parts[:, :, 0].logsumexp(dim=-1)

    def tops(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The best ids of each row and their log-probabilities, `[rows, count]` or as many as there are, from this
        rank's scores `[rows, width]`. See `best_ids`."""
        count = min(count, self.size)
        totals = scores.logsumexp(dim=-1, keepdim=True)
        if self.exchange is None:
            ids, values = best_ids(scores, count)
            return ids, values - totals
        if self.width < count:
            scores = F.pad(scores, (0, count - self.width), value=-math.inf)
        ids, values = best_ids(scores, count)
        said = torch.cat((totals, values, (ids + self.start).to(totals.dtype)), dim=-1)
        parts = self.exchange(said).view(scores.shape[0], -1, 1 + 2 * count)  # [rows, ranks, ...]
        ids, values = best_ids(parts[:, :, 1 : 1 + count].flatten(1), count, parts[:, :, 1 + count :].flatten(1))
        return ids, values - parts[:, :, 0].logsumexp(dim=-1, keepdim=True)


def look(scores: Tensor, values: Tensor, start: int) -> Tensor:
    """What a rank says of its part of each row: `[rows, COLUMNS]` float32.

    The best score, the sum of exponentials of the scores less that, and of the id with the best value: value, score,
    id (which float32 holds up to 2^24). scores and values `[rows, width]` float32; `start`: the first id.
    """
    best = scores.amax(dim=-1)  # NaN where one is
    total = (scores - best[:, None]).exp().sum(dim=-1)
    total = torch.where(best == -math.inf, 0.0, total)  # nothing here may be chosen
    value, place = values.max(dim=-1)
    score = scores.gather(1, place[:, None])[:, 0]
    return torch.stack((best, total, value, score, (place + start).to(torch.float32)), dim=-1)


def join(parts: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, ranks * COLUMNS]` -> tokens `[rows]` int64 and their log-probabilities: NaN where a score is NaN or
    infinite, or where nothing may be chosen."""
    best, total, value, score, ids = parts.view(parts.shape[0], -1, COLUMNS).unbind(-1)
    top = best.amax(dim=-1)
    mass = (total * (best - top[:, None]).exp()).sum(dim=-1)
    winner = value.argmax(dim=-1)[:, None]
    return ids.gather(1, winner)[:, 0].long(), score.gather(1, winner)[:, 0] - top - mass.log()
