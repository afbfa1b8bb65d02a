"""Signs of life of a process: what it writes, and how whoever watches it judges them.

Never torch. Three numbers in a file of the server's private folder, mapped into the memory of all who look:
nothing is sent, nothing can fill up, and a watcher that is stopped itself holds nobody up. All of them read the same
clock, which does not run while the machine sleeps. A thread beats; the main loop tells when it began its present turn
and how long a turn may take. So a process that does nothing at all is told apart from one whose step does not end.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BEAT_EVERY_S = 0.2
STOPPED_LIMIT_S = 10.0  # without a beat, for a process that the kernel says is stopped
_LATE_S = 1.0  # a watcher that was away this long judges from when it is back
_BEAT, _TURN, _LIMIT, _COUNT = range(4)
_GROWTH = 10  # a turn may take so many times the longest one that ended


def heartbeat_path(socket_path: str | Path) -> Path:
    """Of the engine that listens there."""
    return Path(socket_path).with_suffix(".beat")


class Heartbeat:
    """Written by the process that lives. `limit_s`: longest turn; `grows`: or a multiple of the longest so far."""

    def __init__(self, path: Path, limit_s: float = 0.0, grows: bool = False) -> None:
        path.write_bytes(bytes(8 * _COUNT))
        self._map, self._values = _open(path, mmap.ACCESS_WRITE)
        self._limit_s, self._grows = limit_s, grows
        self._longest_ns = 0
        self._values[_LIMIT] = int(limit_s * 1e9)
        self.beat()

    def beat(self) -> None:
        self._values[_BEAT] = time.monotonic_ns()

    def beat_in_thread(self) -> None:
        """Whatever the main thread does, unless it keeps all others from running."""
        threading.Thread(target=self._beat_for_ever, name="tgi-heartbeat", daemon=True).start()

    def _beat_for_ever(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_EVERY_S)

    def turn(self) -> None:
        """The main loop begins another turn."""
        now, began = time.monotonic_ns(), self._values[_TURN]
        self._values[_TURN] = now
        if began and now - began > self._longest_ns:
            self._longest_ns = now - began
            if self._grows:
                self._values[_LIMIT] = int(max(self._limit_s * 1e9, _GROWTH * self._longest_ns))

    def pause(self) -> None:
        """What follows may take as long as it likes, until the next turn."""
        self._values[_TURN] = 0


@dataclass(frozen=True, slots=True)
class Signs:
    """What a look at a heartbeat tells."""

    silent_s: float  # since the last beat
    turn_s: float  # since the present turn began; 0: there is none
    limit_s: float  # how long a turn may take; 0: for ever

    @property
    def is_stuck(self) -> bool:
        return 0 < self.limit_s < self.turn_s


class Watch:
    """Looks at the heartbeat of another process. What a watcher missed while it was away itself is not held against
    the process: the machine may have slept, or all of it been stopped."""

    def __init__(self, path: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises `OSError` if there is no such heartbeat."""
        self._map, self._values = _open(path, mmap.ACCESS_READ)
        self._clock = clock
        self._last_look = self._since = clock()

    def look(self) -> Signs:
        """To be called several times a second."""
        now = self._clock()
        if now - self._last_look > _LATE_S * 1e9:
            self._since = now
        self._last_look = now
        beat, turn, limit = (self._values[field] for field in (_BEAT, _TURN, _LIMIT))
        return Signs(
            max(0, now - max(beat, self._since)) / 1e9,
            max(0, now - max(turn, self._since)) / 1e9 if turn else 0.0,
            limit / 1e9,
        )

    def forgive(self) -> None:
        """Judge from now on only."""
        self._since = self._clock()

    def close(self) -> None:
        self._values.release()
        self._map.close()


def _open(path: Path, access: int) -> tuple[mmap.mmap, memoryview]:
    descriptor = os.open(path, os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY)
    try:
        mapped = mmap.mmap(descriptor, 8 * _COUNT, access=access)
    finally:
        os.close(descriptor)
    return mapped, memoryview(mapped).cast("q")


def is_stopped(pid: int) -> bool:
    """Whether the kernel says that a process was stopped by a signal; False where it says nothing."""
    return _status(pid, "State").startswith("T")


def is_traced(pid: int) -> bool:
    """Whether a debugger or a profiler holds it."""
    return _status(pid, "TracerPid") not in ("", "0")


def _status(pid: int, field: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field + ":")), "")
