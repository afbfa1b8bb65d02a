"""The ids that a draw may still take, as filters one after the other leave them."""

import math

from torch import Tensor


class Candidates:
    """Rows of scores; those of dropped ids are -inf. Sorted at most once: what drops the least keeps the order."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        self._ascending: Tensor | None = None

    @property
    def ascending(self) -> Tensor:
        """The scores of each row from the least to the best."""
        if self._ascending is None:
            self._ascending = self.scores.sort(dim=-1).values
        return self._ascending

    def drop_below(self, floor: Tensor) -> None:
        """floor `[rows]`; what is as good as it stays."""
        self.scores = self.scores.masked_fill(self.scores < floor[:, None], -math.inf)
        if self._ascending is not None:
            self._ascending = self._ascending.masked_fill(self._ascending < floor[:, None], -math.inf)

    def drop(self, dropped: Tensor) -> None:
        """dropped `[rows, ids]` bool."""
        self.scores = self.scores.masked_fill(dropped, -math.inf)
        self._ascending = None
