"""The keyboard of a terminal: keys one at a time and without echo, and the terminal as it was afterwards.

Never torch.
"""

import os
import re
import select
import sys
import termios
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from rich.console import Console

_KEYS = {
    b"\x1b[C": "right",
    b"\x1bOC": "right",
    b"\t": "right",
    b"\x1b[D": "left",
    b"\x1bOD": "left",
    b"\x1b[Z": "left",  # shift and tab
    b"+": "+",
    b"=": "+",  # plus without shift
    b"-": "-",
    b"q": "q",
    b"Q": "q",
    b"\x03": "ctrl-c",
}
_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[@-~]|\x1b|.", re.DOTALL)
_PART_OF_A_KEY = re.compile(rb"\x1b(\[[0-?]*[ -/]*|O)?\Z")
_OFF = b"\x00"  # for a control character: none


def has_terminal() -> bool:
    """Whether somebody sits before it: standard input and error are a terminal that shows our characters."""
    try:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            return False
        in_front = os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # closed, or not there at all
        return False
    shows = (sys.stderr.encoding or "").lower().replace("-", "") == "utf8"
    return in_front and shows and not Console(stderr=True).is_dumb_terminal


def split_keys(data: bytes) -> tuple[list[str], bytes]:
    """The keys that we know in what was typed, and the beginning of a key whose rest has not come."""
    part = _PART_OF_A_KEY.search(data)
    whole, rest = (data[: part.start()], data[part.start() :]) if part else (data, b"")
    keys = (_KEYS.get(found) for found in _KEY.findall(whole))
    return [key for key in keys if key is not None], rest


class Keyboard:
    """Inside the `with`, keys come at once and are not shown. Ctrl-C stays a signal; Ctrl-Z and Ctrl-\\ do nothing,
    since the screen would be left as it is."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno()
        self._before: list[Any] | None = None
        self._rest = b""
        self.gone = False  # the terminal was closed

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._file)
        mode = termios.tcgetattr(self._file)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        for name in (termios.VSUSP, termios.VQUIT):
            mode[6][name] = _OFF
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._file, termios.TCSANOW, mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._file, termios.TCSAFLUSH, self._before)  # what was typed is not for the shell

    def read(self, seconds: float = 0.0) -> list[str]:
        """Keys typed since the last call; waits so long for the first."""
        data = self._rest
        while not self.gone and select.select([self._file], [], [], seconds)[0]:
            seconds = 0.0
            try:
                typed = os.read(self._file, 256)
            except OSError:
                typed = b""
            self.gone = not typed
            data += typed
        keys, self._rest = split_keys(data)
        return keys
