"""The books of pictures' features: which ones the device holds, for whom, and which are computed in the next step.

Pure Python, numbers only. A picture is computed in the step whose chunk first reaches one of its tokens, once for all
requests that have it; one that lies in a cached prefix is not computed at all. Features stay for as long as a request
is within the picture, and after that until their room is needed. What a plan drops is dropped before anything else of
its step, what it computes comes next.
"""

import sys
from collections import OrderedDict
from typing import NamedTuple

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.request import Request
from text_generation_inference.types import (
    GenerationRequest,
    PicturePolicy,
    PictureSpan,
    PictureWork,
    group_neighbours,
    name_group,
)


class PictureGroup(NamedTuple):
    """Pictures that are computed and kept together for layers of cross-attention, from the first token to the end."""

    number: int  # of the first
    digest: str
    num_features: int
    start: int = 0
    end: int = sys.maxsize


class FeatureBook:
    def __init__(self, policy: PicturePolicy, at_once: bool = False) -> None:
        self.policy = policy
        # A prompt is computed in one step, or all of it reads all its pictures: these are there from its first step on.
        self._at_once = at_once or policy.cross_rows > 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # features of each digest, least recently used first
        self._holders: dict[str, set[Request]] = {}  # of those that somebody holds
        self._held: dict[Request, dict[str, PictureSpan | PictureGroup]] = {}
        self._used = 0
        self._num_encoded = self._num_features = self._num_found = 0
        self._left = 0  # of the step being planned
        self._compute: list[tuple[int, int]] = []  # (slot, number among its pictures) of the step being planned
        self._drop: list[str] = []  # whatever step is planned next

    def check(self, source: GenerationRequest, most_tokens: int) -> None:
        """Raise `ValidationError` if a request has a picture that can never be computed."""
        most = self.policy.max_features
        if (each := self.policy.cross_rows) and len(source.pictures) * each > most:
            raise ValidationError(
                f"the prompt has {len(source.pictures)} images, and there is memory for {most // each} at a time"
            )
        for span in self._kept(source):
            if span.num_features > most:
                raise ValidationError(f"an image must have at most {most} tokens. Given: {span.num_features}")
        total = sum({span.digest: span.num_features for span in self._kept(source)}.values())
        if self._at_once and total > most:
            raise ValidationError(f"the images of a request must have at most {most} tokens together. Given: {total}")
        longest = max((end - start for start, end in whole_runs(source, self.policy)), default=0)
        if longest > most_tokens:
            raise ValidationError(
                f"an image and what is computed with it must have at most `max_batch_prefill_tokens` ({most_tokens})"
                f" tokens. Given: {longest}"
            )

    @property
    def work(self) -> PictureWork | None:
        """None where there are no pictures."""
        if not self.policy.max_features:
            return None
        return PictureWork(self._num_encoded, self._num_features, self._num_found)

    def open(self) -> None:
        """The next step is planned: pictures that requests are past are held no more."""
        self._left = self.policy.max_features
        for request, held in list(self._held.items()):
            for digest in [digest for digest, span in held.items() if span.end <= request.reserved]:
                self._let_go(request, digest)

    def may_join(self, request: Request) -> bool:
        """Whether there is room for all that a request must have in its first step."""
        if not self._at_once or not request.source.pictures:
            return True
        wanted = {span.digest: span.num_features for span in self._kept(request.source)}
        new = sum(count for digest, count in wanted.items() if digest not in self._sizes)
        others = sum(self._sizes[digest] for digest in self._holders if digest not in wanted)
        return new <= self._left and others + sum(wanted.values()) <= self.policy.max_features

    def reach(self, request: Request, start: int, end: int, may_exceed: bool) -> int:
        """Where a chunk from `start` ends, at most at `end`, for its pictures: `start` if nothing can be computed now.

        What must be computed at once is, although it may go beyond `end` where `may_exceed`.
        """
        for first, after in request.whole_runs:
            if first < end < after:
                end = after if may_exceed and first <= start else max(start, first)
        for number, span in enumerate(self._kept(request.source)):
            if span.end > start and span.start < end and not self._try_hold(request, number, span):
                return max(start, span.start)
        return end

    def take(self) -> tuple[list[str], list[tuple[int, int]]]:
        """What the step that has been planned drops, and what it computes."""
        found = self._drop, self._compute
        self._drop, self._compute = [], []
        return found

    def let_go(self, request: Request) -> None:
        """It has ended, or waits again."""
        for digest in list(self._held.get(request, ())):
            self._let_go(request, digest)

    def distrust(self, request: Request) -> None:
        """It has failed, and its pictures may be why: they are computed anew for whoever comes next."""
        for span in self._kept(request.source):
            if span.digest in self._sizes and span.digest not in self._holders:
                self._used -= self._sizes.pop(span.digest)
                self._drop.append(span.digest)

    def forget(self) -> None:
        """The device has forgotten everything."""
        self._sizes.clear()
        self._holders.clear()
        self._held.clear()
        self._used = 0
        self._drop, self._compute = [], []

    def verify(self, running: set[Request]) -> None:
        """Raise AssertionError unless the books balance."""
        assert self._used == sum(self._sizes.values()) <= self.policy.max_features
        assert set(self._held) <= running, "a request that does not run holds features"
        holders: dict[str, set[Request]] = {}
        for request, held in self._held.items():
            assert held
            for digest in held:
                holders.setdefault(digest, set()).add(request)
        assert holders == self._holders and set(holders) <= set(self._sizes)

    def _kept(self, source: GenerationRequest) -> "list[PictureSpan] | list[PictureGroup]":
        """What is computed and kept for a request."""
        each, spans = self.policy.cross_rows, source.pictures
        if not each:
            return spans
        groups = group_neighbours(spans)
        return [PictureGroup(group[0], name_group(spans, group), len(group) * each) for group in groups]

    def _try_hold(self, request: Request, number: int, span: "PictureSpan | PictureGroup") -> bool:
        digest = span.digest
        if digest not in self._sizes:
            if not self._try_compute(span):
                return False
            self._compute.append((request.slot, span.number if isinstance(span, PictureGroup) else number))
            self._num_encoded += 1
            self._num_features += span.num_features
        elif digest not in self._held.get(request, ()):
            self._num_found += 1
        self._sizes.move_to_end(digest)
        self._holders.setdefault(digest, set()).add(request)
        self._held.setdefault(request, {})[digest] = span
        return True

    def _try_compute(self, span: "PictureSpan | PictureGroup") -> bool:
        count, most = span.num_features, self.policy.max_features
        free = [digest for digest in self._sizes if digest not in self._holders]
        if count > self._left or self._used - sum(self._sizes[digest] for digest in free) + count > most:
            return False
        for digest in free:
            if self._used + count <= most:
                break
            self._used -= self._sizes.pop(digest)
            self._drop.append(digest)
        self._left -= count
        self._used += count
        self._sizes[span.digest] = count
        return True

    def _let_go(self, request: Request, digest: str) -> None:
        held = self._held[request]
        del held[digest]
        if not held:
            del self._held[request]
        holders = self._holders[digest]
        holders.discard(request)
        if not holders:
            del self._holders[digest]


def whole_runs(source: GenerationRequest, policy: PicturePolicy) -> list[tuple[int, int]]:
    """Tokens that see each other both ways, and so are computed together: (start, end)."""
    if policy.whole_prompts:
        return [(0, len(source.token_ids))]
    if policy.whole_runs:
        return [(start, start + count) for span in source.pictures for start, count in span.runs]
    return []
