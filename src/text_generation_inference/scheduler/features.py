"""The books of pictures' features: which ones the device holds, for whom, and which are to be computed.

Pure Python, numbers only. A picture is asked for by the chunk that first reaches one of its tokens, once for all
requests that have it; one that lies in a cached prefix is not computed at all. It has room from then on. It is computed
in the steps that follow (`encoding`), and a request goes on as far as its next picture until that is there. Features
stay for as long as a request is within the picture, and after that until their room is needed. What a plan drops is
dropped before anything else of its step, what it computes comes next.

Pictures that layers of cross-attention read go the same way, those together that are read together: all of them are
there before their request's first chunk, and stay until it has ended.

Whoever holds room gets on without more of it, and whoever lacks it gets it before those behind: so nobody waits for
ever.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.encoding import EncodeQueue, EncodeWork, Kept, PictureGroup
from text_generation_inference.scheduler.request import Request
from text_generation_inference.types import GenerationRequest, PicturePolicy, PictureWork, group_neighbours, name_group


class Coming(Enum):
    """All features that a request needs before it can join a step."""

    THERE = 0
    ON_THE_WAY = 1
    NO_ROOM = 2


class FeatureBook:
    def __init__(self, policy: PicturePolicy, at_once: bool = False) -> None:
        self.policy = policy
        # A prompt is computed in one step, or all of it reads all its pictures: these are there before its first step.
        self._at_once = at_once or policy.cross_rows > 0
        self._queue = EncodeQueue(policy)
        # Features of each digest that has room, computed or not, least recently used first.
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._holders: dict[str, set[Request]] = {}  # of those that somebody holds
        self._held: dict[Request, dict[str, Kept]] = {}
        self._used = 0
        self._num_encoded = self._num_features = self._num_found = self._num_pixels = self._num_batches = 0
        self._seconds = 0.0
        self._is_short = False  # somebody lacks room in the step being planned: nobody behind gets any
        self._drop: list[str] = []  # whatever step is planned next
        self._distrusted: set[str] = set()  # of those under way

    def check(self, source: GenerationRequest, most_tokens: int, most_positions: int) -> None:
        """Raise `ValidationError` if a request has a picture that can never be computed."""
        if self.policy.has_times and any(span.grid[3:] for span in source.pictures):
            last = _count_positions(source)
            if last + source.max_new_tokens > most_positions:
                raise ValidationError(
                    f"with the times of its videos the prompt has {last} positions, which with `max_new_tokens`"
                    f" ({source.max_new_tokens}) must be <= {most_positions}: send more frames per second, or fewer"
                )
        most = self.policy.max_features
        if (each := self.policy.cross_rows) and len(source.pictures) * each > most:
            raise ValidationError(
                f"the prompt has {len(source.pictures)} images, and there is memory for {most // each} at a time"
            )
        most_each = min(most, self.policy.max_each or most)
        kept = self._kept(source)
        for span in kept:
            if span.num_features > most_each:
                raise ValidationError(f"an image must have at most {most_each} tokens. Given: {span.num_features}")
        total = sum({span.digest: span.num_features for span in kept}.values())
        if (self._at_once or self.policy.whole_prompts) and total > most:
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
        return PictureWork(
            self._num_encoded,
            self._num_features,
            self._num_found,
            self._num_pixels,
            self._num_batches,
            round(self._seconds, 6),
        )

    @property
    def is_busy(self) -> bool:
        """Whether pictures are to be computed."""
        return bool(self._queue)

    def open(self) -> None:
        """The next step is planned: pictures that requests are past are held no more."""
        self._is_short = False
        for request, held in list(self._held.items()):
            for digest in [digest for digest, span in held.items() if span.end <= request.reserved]:
                self._let_go(request, digest)

    def ask(self, request: Request) -> Coming:
        """Whether a waiting request can join a step for its pictures, which are asked for."""
        if not self._at_once or not request.source.pictures:
            return Coming.THERE
        spans = self._kept(request.source)
        if not self._try_hold(request, spans):
            return Coming.NO_ROOM
        return Coming.ON_THE_WAY if any(span.digest in self._queue for span in spans) else Coming.THERE

    def reach(self, request: Request, start: int, end: int, may_exceed: bool) -> int:
        """Where a chunk from `start` ends, at most at `end`, for its pictures: `start` if nothing can be computed now.

        What must be computed at once is, although it may go beyond `end` where `may_exceed`.
        """
        for first, after in request.whole_runs:
            if first < end < after:
                end = after if may_exceed and first <= start else max(start, first)
        spans = [span for span in self._kept(request.source) if span.end > start and span.start < end]
        if self.policy.whole_prompts:
            has_all = self._try_hold(request, spans) and not any(span.digest in self._queue for span in spans)
            return end if has_all else start
        for span in spans:
            if not self._try_hold(request, [span]):
                end = min(end, max(start, span.start))
                break
        for span in spans:  # asked for together, to be computed together
            if span.digest in self._queue and span.start < end:
                return max(start, span.start)
        return end

    def take(self, seconds: float) -> tuple[list[str], EncodeWork, set[Request]]:
        """What the step that has been planned drops; what it computes, in about so long at most; and for whom."""
        drop, self._drop = self._drop, []
        under_way = set(self._queue.under_way)
        work = self._queue.next(seconds)
        self._num_encoded += len(work.begins)
        self._num_batches += bool(work.begins)
        self._num_features += sum(span.num_features for span in work.begins)
        self._num_pixels += sum(span.num_pixels for span in work.begins)
        digests = under_way or {span.digest for span in work.begins}
        wanted = {request for digest in digests for request in self._holders.get(digest, ())}
        for digest in self._distrusted.intersection(work.ends):
            self._distrusted.discard(digest)
            if digest not in self._holders:
                self._forget_one(digest)
        return drop, work, wanted

    def on_step(self, work: EncodeWork, seconds: float) -> None:
        """A step with such work was computed."""
        self._seconds += seconds
        self._queue.on_step(work, seconds)

    def let_go(self, request: Request) -> None:
        """It has ended, or waits again."""
        for digest in list(self._held.get(request, ())):
            self._let_go(request, digest)

    def take_back(self, awaiting: Sequence[Request]) -> bool:
        """Who is next lacks room: those behind it hold none unless they are `awaiting` what is on the way to them, or
        they would wait for each other. False if nobody did."""
        found = [request for request in self._held if not request.running and request not in awaiting]
        for request in found:
            self.let_go(request)
        self._is_short = self._is_short and not found
        return bool(found)

    def distrust(self, request: Request) -> None:
        """It has failed, and its pictures may be why: they are computed anew for whoever comes next."""
        for span in self._kept(request.source):
            if span.digest in self._sizes and span.digest not in self._holders:
                if span.digest in self._queue:
                    self._distrusted.add(span.digest)
                else:
                    self._forget_one(span.digest)

    def shrink(self) -> bool:
        """A step that computed pictures did not fit the device. False if nothing can be made smaller."""
        return self._queue.shrink()

    def forget(self) -> None:
        """The device has forgotten everything."""
        self._queue.forget()
        self._sizes.clear()
        self._holders.clear()
        self._held.clear()
        self._distrusted.clear()
        self._used = 0
        self._drop = []

    def verify(self, alive: set[Request]) -> None:
        """Raise AssertionError unless the books balance."""
        assert self._used == sum(self._sizes.values()) <= self.policy.max_features
        assert set(self._held) <= alive, "a request that neither runs nor is about to holds features"
        holders: dict[str, set[Request]] = {}
        for request, held in self._held.items():
            assert held
            for digest in held:
                holders.setdefault(digest, set()).add(request)
        assert holders == self._holders and set(holders) <= set(self._sizes)
        under_way = set(self._queue.under_way)
        assert not under_way or under_way & set(holders), "what nobody wants is computed"
        assert all(digest in self._sizes for digest in under_way | self._distrusted)

    def _kept(self, source: GenerationRequest) -> Sequence[Kept]:
        """What is computed and kept for a request."""
        each, spans = self.policy.cross_rows, source.pictures
        if not each:
            return spans
        return [PictureGroup(name_group(group), group, len(group) * each) for group in group_neighbours(spans)]

    def _try_hold(self, request: Request, spans: Sequence[Kept]) -> bool:
        """All of them or none."""
        held = self._held.get(request, {})
        if self._is_short and any(span.digest not in held for span in spans):
            return False
        new = {span.digest: span for span in spans if span.digest not in self._sizes}
        if new and not self._try_room(sum(span.num_features for span in new.values()), {s.digest for s in spans}):
            self._is_short = True
            return False
        for span in spans:
            digest = span.digest
            if digest in new:
                if digest not in self._sizes:
                    self._sizes[digest] = span.num_features
                    self._used += span.num_features
                    self._queue.add(span)
            elif digest not in self._held.get(request, ()):
                self._num_found += 1
            self._sizes.move_to_end(digest)
            self._holders.setdefault(digest, set()).add(request)
            self._held.setdefault(request, {})[digest] = span
        return True

    def _try_room(self, count: int, wanted: set[str]) -> bool:
        """Drop what nobody holds or is about to until so many features more have room."""
        kept = {*self._holders, *self._queue.under_way, *wanted}
        free = [digest for digest in self._sizes if digest not in kept]
        if self._used - sum(self._sizes[digest] for digest in free) + count > self.policy.max_features:
            return False
        for digest in free:
            if self._used + count <= self.policy.max_features:
                break
            self._forget_one(digest)
        return True

    def _forget_one(self, digest: str) -> None:
        self._used -= self._sizes.pop(digest)
        self._drop.append(digest)

    def _let_go(self, request: Request, digest: str) -> None:
        held = self._held[request]
        del held[digest]
        if not held:
            del self._held[request]
        holders = self._holders[digest]
        holders.discard(request)
        if holders:
            return
        del self._holders[digest]
        if self._queue.cancel(digest):
            self._used -= self._sizes.pop(digest)
        elif digest in self._queue and not any(other in self._holders for other in self._queue.under_way):
            for other in self._queue.under_way:
                self._distrusted.discard(other)
                self._forget_one(other)
            self._queue.abandon()


def _count_positions(source: GenerationRequest) -> int:
    """Of a prompt with videos, whose moments say their times: more than tokens, where these are far apart."""
    position = token = 0
    for span in source.pictures:
        moments, rows, columns, *times = span.grid
        merge = math.isqrt(moments * rows * columns // span.num_features)
        position += span.start - token + max(rows // merge, columns // merge, max(times, default=0) + 1)
        token = span.end
    return position + len(source.token_ids) - token


def whole_runs(source: GenerationRequest, policy: PicturePolicy) -> list[tuple[int, int]]:
    """Tokens that see each other both ways, and so are computed together: (start, end)."""
    if policy.whole_prompts:
        return [(0, len(source.token_ids))]
    if policy.whole_runs:
        return [(start, start + count) for span in source.pictures for start, count in span.runs]
    return []
