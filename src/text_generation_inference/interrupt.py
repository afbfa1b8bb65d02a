"""Keeps Ctrl-C out of a stretch of code that must run to its end."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Generator[None]:
    """A SIGINT that arrives inside takes effect at the end. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted and callable(before):
        before(noted[0], None)
