"""How many prompt tokens a step may compute beside others' decode tokens, so that it takes a given time at most.

Pure Python. Who streams waits for every step as a whole, prompts of others included. A chunk's time is what
its tokens take in the matrices plus what they take in attention, which grows with the tokens before it; both rates are
learnt from the steps that were computed. Where nobody decodes nobody waits, and chunks are as large as they may be.
"""

import math
from dataclasses import dataclass

_SMALLEST_CHUNK = 16  # tokens; less would not be worth a step
_MANY_BLOCKS = 4  # a chunk of fewer is not cut to whole ones
_DECODE_SHARE = 0.5  # a step with prompts may at least take twice as long as one without: prompts must get on too
_ENCODER_SHARE = 0.25  # of what a step has for prompts: for pictures, if there are any to compute
_ALONE_S = 0.5  # for pictures where nobody decodes: whoever arrives waits that long
_FORGET = 0.9  # weight of what was learnt before, with each step
_LEAST_SPREAD = 1e-3  # of two kinds of work, below which they cannot be told apart
_MOST_OFF = 4.0  # a decode step that took so many times as long as those before is taken for one that took this many


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computed."""

    decode_rows: int
    prompt_tokens: int
    attended: int  # sum over the prompt tokens of the tokens they look at


def attended(start: int, end: int, window: int | None = None) -> int:
    """Tokens looked at by those from `start` to `end`, themselves included; no more than a window by each."""
    if window is None or end <= window:
        return (end * (end + 1) - start * (start + 1)) // 2
    near = attended(start, window) if start < window else 0
    return near + (end - max(start, window)) * window


class StepRoom:
    """What the step being planned has left."""

    def __init__(
        self,
        tokens: int,
        seconds: float,
        per_token: float,
        per_attended: float,
        block_size: int,
        window: int | None = None,
    ) -> None:
        self.tokens = tokens
        self._window = window
        self._seconds, self._block_size = seconds, block_size
        self._per_token, self._per_attended = per_token, per_attended
        self._is_first = True

    @property
    def is_open(self) -> bool:
        """Whether another chunk may join the step; the first one always may."""
        return self.tokens > 0 and (self._is_first or self._affordable(0) >= _SMALLEST_CHUNK)

    @property
    def is_untouched(self) -> bool:
        return self._is_first

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._seconds)

    def keep_back(self, share: float) -> None:
        """For something else than prompts."""
        self._seconds *= 1 - share

    def reach(self, start: int, known: int, timed: bool = True) -> int:
        """Where a chunk from `start` may end, at most at `known`. Some tokens may always be taken. `timed`: it may end
        early for the time it takes, where shapes matter."""
        end = min(known, start + self.tokens)
        affordable = start + self._affordable(start)
        if affordable < end:
            if affordable - start >= _MANY_BLOCKS * self._block_size:
                affordable -= affordable % self._block_size  # whole blocks can be found by others at once
            end = min(end, max(affordable, start + _SMALLEST_CHUNK))
        return end

    def spend(self, start: int, end: int) -> None:
        """A chunk takes these tokens."""
        self._is_first = False
        self.tokens -= end - start
        self._seconds -= (end - start) * self._per_token + attended(start, end, self._window) * self._per_attended

    def _affordable(self, start: int) -> int:
        """The most tokens n with n * per_token + attended(start, start + n) * per_attended within the time left."""
        if math.isinf(self._seconds):
            return self.tokens
        if self._seconds <= 0:
            return 0
        linear = self._per_token + self._per_attended * (start + 0.5)
        square = self._per_attended / 2
        if self._window is not None and start >= self._window:
            linear, square = self._per_token + self._per_attended * self._window, 0.0
        root = (math.sqrt(linear * linear + 4 * square * self._seconds) + linear) / 2
        return int(self._seconds / root) if root > 0 else self.tokens


class StepPace:
    """Learns how long steps take. Without `max_step_s` there is no limit and nothing is learnt."""

    def __init__(self, max_step_s: float | None, block_size: int, window: int | None = None) -> None:
        self._max_step_s, self._block_size, self._window = max_step_s, block_size, window
        self._decode_s = 0.0  # a step without prompts
        self._per_token = self._per_attended = 0.0
        # Weighted sums over steps: of squares and products of tokens and attended tokens, and of both with seconds.
        self._tt = self._ta = self._aa = self._ts = self._as = 0.0

    def room(self, num_decode: int, tokens: int) -> StepRoom:
        """For prompt chunks beside `num_decode` decode tokens: at most so many tokens."""
        seconds = self._allowed(num_decode)
        return StepRoom(tokens, seconds, self._per_token, self._per_attended, self._block_size, self._window)

    def keep_for_encoder(self, room: StepRoom) -> None:
        """There are pictures to compute in the step, too."""
        room.keep_back(_ENCODER_SHARE)

    def encoder_seconds(self, num_decode: int, room: StepRoom) -> float:
        """For pictures beside `num_decode` decode tokens, when prompts have taken theirs."""
        if self._max_step_s is None:
            return math.inf
        if not num_decode:
            return max(self._max_step_s, _ALONE_S)
        allowed = self._allowed(num_decode)
        return min(allowed, _ENCODER_SHARE * allowed + room.seconds_left)

    def _allowed(self, num_decode: int) -> float:
        """What a step may take longer for others than those who decode."""
        if self._max_step_s is None or not num_decode:
            return math.inf
        return max(self._max_step_s - self._decode_s, self._decode_s / _DECODE_SHARE - self._decode_s)

    def on_step(self, work: StepWork, seconds: float) -> None:
        """A step was computed, in so long without its pictures."""
        if self._max_step_s is None or seconds <= 0 or not work.decode_rows + work.prompt_tokens:
            return
        if work.prompt_tokens == 0:
            self._decode_s = _between(self._decode_s, seconds)
            return
        seconds = max(seconds - (self._decode_s if work.decode_rows else 0.0), seconds / 10)
        self._add(work.prompt_tokens, work.attended, seconds)
        self._solve()

    def _add(self, tokens: int, looked_at: int, seconds: float) -> None:
        # What counts is by how much a step was off, not how long it was: one that was held up by something else, and
        # took many times as long as its work, weighs little.
        weight = 1 / (seconds * seconds)
        self._tt = _FORGET * self._tt + weight * tokens * tokens
        self._ta = _FORGET * self._ta + weight * tokens * looked_at
        self._aa = _FORGET * self._aa + weight * looked_at * looked_at
        self._ts = _FORGET * self._ts + weight * tokens * seconds
        self._as = _FORGET * self._as + weight * looked_at * seconds

    def _solve(self) -> None:
        """Least squares for the two rates, neither below zero."""
        spread = self._tt * self._aa - self._ta * self._ta
        if spread < _LEAST_SPREAD * self._tt * self._aa:
            # All steps were alike. Either kind of work may have taken all the time: both are expected to, which is at
            # most twice too much, until chunks of other sizes tell.
            self._per_token, self._per_attended = self._ts / self._tt, self._as / self._aa
            return
        per_token = (self._ts * self._aa - self._as * self._ta) / spread
        per_attended = (self._as * self._tt - self._ts * self._ta) / spread
        if per_attended < 0:
            per_token, per_attended = self._ts / self._tt, 0.0
        elif per_token < 0:
            per_token, per_attended = 0.0, self._as / self._aa
        self._per_token, self._per_attended = per_token, per_attended


def _between(before: float, seconds: float) -> float:
    """A running mean that a single pause does not move far."""
    return seconds if before == 0 else before + 0.2 * (min(seconds, _MOST_OFF * before) - before)
