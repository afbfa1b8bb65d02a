"""Who is shown the progress, and the displays that need no terminal: none, and plain lines on standard error.

Never torch. `screen` is the display of a terminal.
"""

import sys
import time
from enum import Enum
from types import TracebackType
from typing import Self

from text_generation_inference.bench.row_progress import describe_seconds
from text_generation_inference.bench.static.results import summarise
from text_generation_inference.bench.static.state import State

_SECONDS_BETWEEN_LINES = 10.0


class Quit(Exception):
    """The user asked for the end; what was measured counts."""


class Moment(Enum):
    """When a display is asked whether it wants a turn, the best moment first."""

    BETWEEN_ROUNDS = 1  # disturbs nothing
    BETWEEN_STEPS = 2  # the clock stands still, but the next step starts cold
    IN_A_STEP = 3  # the device computes


class Display:
    """Shows nothing. Gets turns while the clock of the measurement stands still, where that is possible."""

    def wants_turn(self, moment: Moment) -> bool:
        """Costs next to nothing. May raise `Quit`."""
        return False

    def take_turn(self) -> None: ...

    def finish(self) -> None:
        """Everything is measured. Returns when the user has seen it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class ProgressLines(Display):
    """A line for each batch size, and one now and then while it takes long."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._num_told = 0
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def wants_turn(self, moment: Moment) -> bool:
        if moment is Moment.IN_A_STEP:
            return False
        return self._state.num_finished > self._num_told or time.monotonic() > self._next_line

    def take_turn(self) -> None:
        state = self._state
        if state.num_finished == self._num_told:
            size, share = state.batches[state.current].batch_size, state.batch_share
            self._say(f"batch size {size}: round {state.rounds} of {state.rounds_per_batch} ({share:.0%})")
        while self._num_told < state.num_finished:
            batch = state.batches[self._num_told]
            self._num_told += 1
            prefill, token = summarise(batch.prefill_ms).average, summarise(batch.decode_token_ms).average
            decode = f", decode {token:.2f} ms per token" if batch.decode_token_ms else ""
            self._say(f"batch size {batch.batch_size}: prefill {prefill:.2f} ms{decode}")
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES

    def finish(self) -> None:
        self.take_turn()

    def _say(self, text: str) -> None:
        left = self._state.total_seconds_left()
        done = f"{self._state.num_finished} of {len(self._state.batches)} batch sizes"
        rest = "" if self._state.finished or left is None else f", {describe_seconds(left)} left"
        print(f"{text} [{done}{rest}]", file=sys.stderr, flush=True)
