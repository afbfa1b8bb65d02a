"""How far a row of `tgi bench offline` is and how long it will still take, in one line.

Standard library only. Nothing is drawn by a thread of its own, which would take part in what is measured.
"""

import shutil
import sys
import time
from collections.abc import Callable

from text_generation_inference.bench.results import Row

_SECONDS_BETWEEN_LINES = 30.0  # where a line cannot be replaced by the next
_BAR = 20


class RowProgress:
    """`tell` gets the tokens of the iteration that runs; the first come late, when all prompts were read."""

    def __init__(self, row: Row, iterations: int, place: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._row, self._iterations, self._place, self._clock = row, iterations, place, clock
        self._total = row.outputs * row.requests
        self._finished: list[float] = []  # seconds of each iteration
        self._start: float | None = None
        self._num_tokens = self._first_tokens = 0
        self._first_word = 0.0

    def start_iteration(self) -> None:
        now = self._clock()
        if self._start is not None:
            self._finished.append(now - self._start)
        self._start, self._num_tokens, self._first_tokens = now, 0, 0

    def tell(self, num_tokens: int) -> None:
        if not self._first_tokens:
            self._first_word, self._first_tokens = self._clock(), num_tokens
        self._num_tokens = num_tokens

    def seconds_left(self) -> float | None:
        """None as long as there is nothing to go by."""
        now = self._clock()
        elapsed = 0.0 if self._start is None else now - self._start
        later = self._iterations - len(self._finished) - 1
        if self._finished:
            mean = sum(self._finished) / len(self._finished)
            return max(0.0, mean - elapsed) + later * mean
        grown = self._num_tokens - self._first_tokens
        if grown <= 0:
            return None
        left = (self._total - self._num_tokens) * (now - self._first_word) / grown
        return left + later * (elapsed + left)

    def describe(self, bar: bool) -> str:
        done = len(self._finished) * self._total + self._num_tokens
        total = self._iterations * self._total
        left = self.seconds_left()
        drawn = f"{draw_bar(done / total)} " if bar else ""
        ending = "" if left is None else f", {describe_seconds(left)} left"
        return f"{self._row} ({self._place}): {drawn}{done:,} of {total:,} tokens ({done / total:.0%}){ending}"


class StatusLines:
    """Says lines on standard error; on a terminal a passing one is replaced by the next."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        if not self.quiet:
            self._last = time.monotonic()
            print(f"\r\x1b[K{text}" if self.terminal else text, file=sys.stderr, flush=True)

    def pass_by(self, text: str) -> None:
        if not self.quiet and self.terminal:
            print(f"\r\x1b[K{cut(text)}", end="", file=sys.stderr, flush=True)

    def progress(self, describe: Callable[[bool], str]) -> None:
        """`describe` is told whether to draw a bar."""
        if self.terminal:
            self.pass_by(describe(True))
        elif time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self.say(describe(False))

    def clear(self) -> None:
        """Nothing half-said stays on a terminal."""
        if not self.quiet and self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def cut(text: str) -> str:
    """To the width of the terminal: a line that wraps cannot be replaced."""
    return text[: max(20, shutil.get_terminal_size().columns - 1)]


def draw_bar(share: float) -> str:
    full = min(_BAR, int(share * _BAR))
    return "━" * full + "·" * (_BAR - full)


def describe_seconds(seconds: float) -> str:
    """1:05, 2:03:04."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
