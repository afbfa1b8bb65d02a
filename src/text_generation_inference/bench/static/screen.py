"""The display of a terminal: the whole screen while it runs, and everything as it was afterwards.

Never torch. Draws only when it has its turn, on the thread that measures: no thread and no timer of its own
could disturb what is measured.
"""

import os
import sys
import time
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from text_generation_inference.bench.static.display import Display, Moment, Quit
from text_generation_inference.bench.static.state import State
from text_generation_inference.bench.static.terminal import Keyboard
from text_generation_inference.bench.static.view import Look, draw
from text_generation_inference.interrupt import uninterrupted

_SECONDS_BETWEEN_FRAMES = 0.25
_SECONDS_BETWEEN_LOOKS = 0.05  # at the keyboard and the size of the window


class Screen(Display):
    def __init__(self, state: State) -> None:
        self._state = state
        self._look = Look()
        self._keyboard = Keyboard()
        self._console = Console(file=sys.stderr)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._stack = ExitStack()
        self._size = (0, 0)
        self._next_look = self._next_frame = 0.0

    def __enter__(self) -> Self:
        with uninterrupted(), ExitStack() as stack:  # the terminal is never left half way
            stack.enter_context(self._keyboard)
            stack.enter_context(self._live)
            self._stack = stack.pop_all()
        self.take_turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with uninterrupted(), suppress(OSError):  # the terminal may be gone
            self._stack.close()

    def wants_turn(self, moment: Moment) -> bool:
        """A frame is drawn between rounds; between steps only when rounds are so long that it would come late. A key
        or a new size of the window is answered at once."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        if self._take_keys(self._keyboard.read()) or self._find_size() != self._size:
            return True
        late = now - self._next_frame
        return (moment is Moment.BETWEEN_ROUNDS and late >= 0) or (
            moment is Moment.BETWEEN_STEPS and late >= _SECONDS_BETWEEN_FRAMES
        )

    def take_turn(self) -> None:
        with uninterrupted():
            self._size = self._find_size()
            width, height = self._console.size = self._size  # pyright: ignore[reportAttributeAccessIssue]
            self._live.update(draw(self._state, self._look, width, height), refresh=True)
        self._next_frame = time.monotonic() + _SECONDS_BETWEEN_FRAMES

    def finish(self) -> None:
        """Shows the result until a key or a signal says that it was seen."""
        self.take_turn()
        while not self._keyboard.gone:
            if self._take_keys(self._keyboard.read(_SECONDS_BETWEEN_FRAMES)) or self._find_size() != self._size:
                self.take_turn()

    def _take_keys(self, keys: list[str]) -> bool:
        """True if something looks different now."""
        changed = False
        for key in keys:
            if key == "q":
                raise Quit
            if key == "ctrl-c":
                raise KeyboardInterrupt
            if self._look.follows:
                self._look.tab = self._state.current
            changed |= self._look.press(key, len(self._state.batches))
        if self._keyboard.gone:
            raise KeyboardInterrupt
        return changed

    def _find_size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(sys.stderr.fileno())
        except OSError:
            return 80, 24
        return max(1, columns), max(1, rows)
