"""What the sampler asks of a part that changes scores before the temperature."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from text_generation_inference.types import Admission, SamplingParams

Arrays = list[np.ndarray]


@dataclass(slots=True)
class KnownTokens:
    """The tokens of all requests so far, on the host: kept by the runner, read by the parts that depend on them."""

    pages: np.ndarray  # [pages, block_size]: token ids
    tables: np.ndarray  # [slots, max_blocks]: the pages of each slot
    last: np.ndarray  # [slots]: each slot's last token
    lengths: np.ndarray  # [slots]
    max_tokens: int  # of a slot

    @property
    def num_slots(self) -> int:
        return len(self.lengths)

    def history(self, slots: np.ndarray, count: int) -> np.ndarray:
        """The first `count` tokens of the slots; past what is known: anything."""
        blocks = self.tables[slots, : -(-count // self.pages.shape[1])]
        # A copy even of one row, which counts as contiguous whatever its stride: programs are compiled by strides.
        return self.pages[blocks].reshape(len(slots), -1)[:, :count].copy()


@dataclass(frozen=True, slots=True)
class Room:
    """How wide a table is made that has a column per known token or bias."""

    pads: bool  # to few sizes, as every one is a shape

    def fit(self, count: int, most: int) -> int:
        if not self.pads:
            return count
        return next(size for size in self.sizes(most) if size >= min(count, most))

    def sizes(self, most: int) -> Iterator[int]:
        """Every size of a padded table for at most so many, ascending."""
        size = 64
        while size < most:
            yield size
            size *= 4
        yield most


class SamplingPart(Protocol):
    """Slots are given as an array in which -1 stands for padding. Arrays go to the device and from there to `apply`."""

    def asks(self, params: SamplingParams) -> bool:
        """Whether a request needs this part at all."""
        ...

    def admit(self, admission: Admission) -> None:
        """Take over a slot's parameters."""
        ...

    def keep(self, slots: np.ndarray) -> Arrays:
        """What stays the same as long as the rows do."""
        ...

    def step(self, slots: np.ndarray) -> Arrays:
        """What differs from token to token."""
        ...

    def shapes(self, num_rows: int) -> Iterator[Arrays]:
        """What `keep` and `step` give together, all neutral, in every shape that padded rows may have."""
        ...

    @property
    def apply(self) -> Callable[..., Tensor]:
        """(scores, *arrays of `keep`, *arrays of `step`) -> scores, in place or not."""
        ...
