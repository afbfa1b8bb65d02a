"""Signs of life, and what a watcher makes of them; the clock is the test's."""

import os
import time
from pathlib import Path

import pytest

from text_generation_inference.engine import heartbeat
from text_generation_inference.engine.heartbeat import Heartbeat, Watch
from text_generation_inference.launch import hangs

MS = 1_000_000


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000 * MS
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now)

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pass_time(clock: Clock, watch: Watch, seconds: float, beats: Heartbeat | None = None) -> str | None:
    """As a watcher lives it: several looks a second."""
    found = None
    for _ in range(round(seconds * 4)):
        clock.now += 250 * MS
        if beats is not None:
            beats.beat()
        found = found or hangs.find_hang(watch, os.getpid())
    return found


def test_a_step_that_does_not_end(tmp_path: Path, clock: Clock) -> None:
    beats = Heartbeat(tmp_path / "beat", 60.0)
    beats.turn()
    watch = Watch(tmp_path / "beat", clock)
    assert pass_time(clock, watch, 59, beats) is None
    assert pass_time(clock, watch, 2, beats) == "hung: a step has been running for 60 s"
    beats.turn()
    assert pass_time(clock, watch, 1, beats) is None
    watch.close()


def test_before_the_first_turn_and_in_a_pause_nothing_is_timed(tmp_path: Path, clock: Clock) -> None:
    beats = Heartbeat(tmp_path / "beat", 60.0)
    watch = Watch(tmp_path / "beat", clock)
    assert pass_time(clock, watch, 200, beats) is None
    beats.turn()
    beats.pause()
    assert pass_time(clock, watch, 200, beats) is None


def test_no_sign_of_life(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    Heartbeat(tmp_path / "beat", 60.0)
    watch = Watch(tmp_path / "beat", clock)
    assert pass_time(clock, watch, 59) is None  # it may be busy in a library that lets nobody else run
    assert pass_time(clock, watch, 2) == "hung: it has shown no sign of life for 60 s"
    watch.forgive()
    monkeypatch.setattr(hangs, "is_stopped", lambda pid: True)
    assert pass_time(clock, watch, 9.5) is None
    assert pass_time(clock, watch, 1) == "hung: it has been stopped for 10 s"


def test_a_watcher_that_was_away_begins_anew(tmp_path: Path, clock: Clock) -> None:
    beats = Heartbeat(tmp_path / "beat", 5.0)
    beats.turn()
    watch = Watch(tmp_path / "beat", clock)
    clock.now += 3_600_000 * MS  # all of the machine slept
    assert hangs.find_hang(watch, os.getpid()) is None
    assert pass_time(clock, watch, 4.5) is None
    assert pass_time(clock, watch, 1) is not None


def test_what_a_debugger_holds_is_left_alone(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    Heartbeat(tmp_path / "beat", 5.0)
    watch = Watch(tmp_path / "beat", clock)
    monkeypatch.setattr(hangs, "is_traced", lambda pid: True)
    assert pass_time(clock, watch, 60) is None


def test_the_limit_grows_with_what_steps_take_unless_it_was_given(tmp_path: Path, clock: Clock) -> None:
    for grows, expected in ((True, 200.0), (False, 60.0)):
        beats = Heartbeat(tmp_path / "beat", 60.0, grows)
        for seconds in (0, 2, 20, 1):
            clock.now += seconds * 1000 * MS
            beats.turn()
        assert Watch(tmp_path / "beat", clock).look().limit_s == expected


def test_what_the_kernel_says_of_this_process() -> None:
    assert not heartbeat.is_stopped(os.getpid())
    assert not heartbeat.is_traced(os.getpid())
    assert not heartbeat.is_stopped(2**22 + 1)
