"""Log lines on their way out, which nobody waits for.

A pipe that is not read, a terminal that is held, a slow disk: a write may take for ever. Lines go through a
queue to a thread that writes them, in order; beyond a bound they are dropped and counted, and the log says how many
once it flows again.
"""

import logging
import os
import queue
import threading
import time
from contextlib import suppress

MAX_QUEUED_BYTES = 1 << 20
_LAST_WORDS_S = 2.0  # for what is left at the end, if somebody reads it


class QueuedHandler(logging.Handler):
    """Writes to a descriptor. Never waits, except for a while when it is flushed."""

    def __init__(self, descriptor: int, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._queued = 0  # bytes ever put into it; changed with the handler's lock held
        self._written = 0  # bytes ever taken out and written, or lost; changed by the thread alone
        self._untold = 0  # lines dropped since the log last said so
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._write_for_ever, name="tgi-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._encode(record)
        except Exception:
            self.handleError(record)
            return
        if self._untold and self._room(0) > self._max_bytes // 2:
            dropped, self._untold = self._untold, 0
            self._put(self._encode(_tell_dropped(dropped)))
        if self._untold or self._room(len(line)) < 0:  # once lines are dropped, until half of the room is free
            self._untold += 1
            self.num_dropped += 1
            return
        self._put(line)

    def _encode(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "replace")

    def _room(self, num_bytes: int) -> int:
        return self._max_bytes - (self._queued - self._written) - num_bytes

    def _put(self, line: bytes) -> None:
        self._queued += len(line)
        self._lines.put(line)

    def _write_for_ever(self) -> None:
        while True:
            data = self._lines.get()
            size = len(data)
            while size < 65_536 and not self._lines.empty():  # what came meanwhile goes in one write
                more = self._lines.get()
                data, size = data + more, size + len(more)
            with suppress(OSError):  # nobody is there to read it
                self._write(data)
            self._written += size

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # whoever shares the descriptor made it so
                time.sleep(0.05)

    def flush(self) -> None:
        """Until everything is written, as long as somebody reads."""
        end = time.monotonic() + _LAST_WORDS_S
        while self._written < self._queued and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.002)

    def close(self) -> None:
        with self.lock or threading.Lock():
            if self._untold:
                self._put(self._encode(_tell_dropped(self._untold)))
                self._untold = 0
        self.flush()
        super().close()


def _tell_dropped(count: int) -> logging.LogRecord:
    text = "Nobody read the log: lines were dropped"
    record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
    record.fields = {"dropped": count}
    return record
