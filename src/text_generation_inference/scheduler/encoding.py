"""In which order pictures are computed, which of them together, and how much of that goes into a step.

Pure Python, numbers only. One batch is under way at a time. Its computing has parts, and each step does as many as fit
the time that it may spend on pictures, at least one: so that whoever streams waits for a part of a tower's pass, and
not for all of it. How long a part takes is learnt from the steps that were computed.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from text_generation_inference.types import PicturePolicy, PictureSpan

_FORGET = 0.7  # weight of what was learnt before, with each step


@dataclass(frozen=True, slots=True)
class PictureGroup:
    """Pictures that are kept together for layers of cross-attention, from the first token to the end. They are computed
    one after the other, each in as many parts as any picture has."""

    digest: str  # of all
    spans: list[PictureSpan]
    num_features: int
    start: int = 0
    end: int = sys.maxsize

    @property
    def num_pixels(self) -> int:
        return sum(span.num_pixels for span in self.spans)


Kept = PictureSpan | PictureGroup  # what is computed and kept as one


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """What a step does of it."""

    begins: list[Kept] = field(default_factory=list[Kept])
    num_parts: int = 0
    size: int = 0  # parts times pixels
    ends: list[str] = field(default_factory=list[str])  # digests whose features are there when it is done

    @property
    def pictures(self) -> list[PictureSpan]:
        """Whose computing begins: a group is alone, so that it is known which these are."""
        if len(self.begins) == 1 and isinstance(group := self.begins[0], PictureGroup):
            return group.spans
        return [span for span in self.begins if isinstance(span, PictureSpan)]


class EncodeQueue:
    def __init__(self, policy: PicturePolicy) -> None:
        self._policy = policy
        self._waiting: OrderedDict[str, Kept] = OrderedDict()  # by digest, in the order of asking
        self._batch: dict[str, Kept] = {}  # under way
        self._left = 0  # parts of it
        self._num_pixels = 1  # of each part
        self._rate = 0.0  # seconds for a part of one pixel; 0: not known yet
        self._num_failed = 0  # batches in a row that were too large for the device

    def __bool__(self) -> bool:
        return bool(self._batch or self._waiting)

    def __contains__(self, digest: str) -> bool:
        return digest in self._batch or digest in self._waiting

    @property
    def under_way(self) -> Iterable[str]:
        return self._batch

    def add(self, span: Kept) -> None:
        self._waiting[span.digest] = span

    def cancel(self, digest: str) -> bool:
        """Nobody wants it any more. False if it is under way."""
        return self._waiting.pop(digest, None) is not None

    def abandon(self) -> None:
        """What is under way."""
        self._batch, self._left = {}, 0

    def next(self, seconds: float) -> EncodeWork:
        """What a step does that may spend so long on pictures."""
        begins: list[Kept] = []
        if not self._batch:
            begins = self._begin()
        if not self._batch:
            return EncodeWork()
        num_pixels, parts = self._num_pixels, 1
        if self._rate:
            parts = max(1, int(min(seconds / (self._rate * num_pixels), self._left)))
        elif seconds == float("inf"):
            parts = self._left
        self._left -= parts
        ends = list(self._batch) if not self._left else []
        if ends:
            self._batch = {}
        return EncodeWork(begins, parts, parts * num_pixels, ends)

    def on_step(self, work: EncodeWork, seconds: float) -> None:
        """A step with such work was computed, which took so long for it."""
        if work.ends:
            self._num_failed = 0
        if work.size and seconds > 0:
            rate = seconds / work.size
            self._rate = rate if not self._rate else _FORGET * self._rate + (1 - _FORGET) * rate

    def shrink(self) -> bool:
        """A step of it did not fit the device, which has forgotten everything. False: none can be smaller."""
        self._num_failed += 1
        return self._num_failed <= 2

    def forget(self) -> None:
        self._waiting.clear()
        self.abandon()

    def _begin(self) -> list[Kept]:
        begins: list[Kept] = []
        left = self._policy.batch_pixels
        while self._waiting:
            span = next(iter(self._waiting.values()))
            # After a lack of memory one by one; groups always.
            if begins and (span.num_pixels > left or self._num_failed or isinstance(span, PictureGroup)):
                break
            left -= span.num_pixels
            begins.append(self._waiting.pop(span.digest))
        self._batch = {span.digest: span for span in begins}
        num_passes = sum(len(span.spans) if isinstance(span, PictureGroup) else 0 for span in begins) or 1
        self._left = self._policy.num_parts * num_passes
        self._num_pixels = max(1, sum(span.num_pixels for span in begins) // num_passes)
        return begins
