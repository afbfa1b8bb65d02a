"""Faults on demand, for tests: a named place in the code that raises, waits, hangs or lacks memory when told to.

Without `configure`, which the processes call with TGI_FAILPOINTS, `failpoint` does nothing. What is asked for:
`place=action` with semicolons between, or `@FILE`, a file with the same text that may change while the program runs:

    engine.launch=raise         every time
    engine.apply=memory@3       the third time only
    api.write=delay:0.5         each time, after half a second
    engine.plan=hang            never comes back
    engine.send=kill            the process ends as by SIGKILL
    1:engine.compute=raise      on rank 1 of a model that is split over ranks; without a number, on rank 0
"""

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from text_generation_inference.errors import StartError

PLACES = (
    "engine.receive",
    "engine.plan",
    "engine.launch",
    "engine.compute",
    "engine.apply",
    "engine.encode",
    "engine.send",
    "engine.compile",
    "rank.load",
    "api.validate",
    "api.submit",
    "api.deliver",
    "api.write",
    "picture.decode",
)
_ACTIONS = ("raise", "memory", "delay", "hang", "kill")


class FailpointError(RuntimeError):
    """What `raise` raises: no error that the code expects."""


@dataclass(frozen=True, slots=True)
class _Fault:
    action: str
    seconds: float
    only: int | None  # which time it is met; None: every time


class _Faults:
    """What is asked for, and how often each place was met since then."""

    def __init__(self, text: str, rank: int) -> None:
        self._rank = rank
        self._path = Path(text[1:]) if text.startswith("@") else None
        self._text = ""
        self._by_place: dict[str, _Fault] = {}
        self._met: Counter[str] = Counter()
        if self._path is None:
            self._set(text)

    def meet(self, place: str) -> None:
        if self._path is not None:
            self._set(self._path.read_text() if self._path.exists() else "")
        fault = self._by_place.get(place)
        if fault is None:
            return
        self._met[place] += 1
        if fault.only is None or fault.only == self._met[place]:
            _act(fault, place)

    def _set(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self._by_place = _parse(text, self._rank)
            self._met.clear()


_faults: _Faults | None = None


def configure(text: str | None, rank: int = 0) -> None:
    """Raises `StartError` for what is no failpoint."""
    global _faults
    _faults = _Faults(text, rank) if text else None


def failpoint(place: str) -> None:
    """Here something may go wrong, if a test wants it to."""
    if _faults is not None:
        _faults.meet(place)


def _parse(text: str, rank: int) -> dict[str, _Fault]:
    found: dict[str, _Fault] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        where, _, what = item.partition("=")
        on, _, place = where.rpartition(":")
        what, _, time_met = what.partition("@")
        action, _, seconds = what.partition(":")
        if place not in PLACES or action not in _ACTIONS or not (on or "0").isdigit():
            raise StartError(f"TGI_FAILPOINTS: {item!r} is no failpoint. Places: {', '.join(PLACES)}")
        if int(on or 0) != rank:
            continue
        found[place] = _Fault(action, float(seconds or 0), int(time_met) if time_met else None)
    return found


def _act(fault: _Fault, place: str) -> None:
    match fault.action:
        case "raise":
            raise FailpointError(f"failpoint {place}")
        case "memory":
            raise RuntimeError(f"failpoint {place}: can't allocate memory")
        case "delay":
            time.sleep(fault.seconds)
        case "hang":
            while True:
                time.sleep(3600)
        case _:
            os.kill(os.getpid(), signal.SIGKILL)
