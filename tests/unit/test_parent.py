"""A process ends with the one that started it, at whatever moment that one dies."""

import os
import signal
import subprocess
import sys

PROGRAM = (
    "from text_generation_inference.engine.parent import end_with_parent; end_with_parent(); import sys; sys.exit(7)"
)


def run(stdout: int) -> int:
    return subprocess.run([sys.executable, "-c", PROGRAM], stdout=stdout, timeout=60).returncode


def test_one_whose_parent_died_while_it_was_starting() -> None:
    ours, theirs = os.pipe()
    os.close(ours)  # as it is when the parent is gone
    try:
        assert run(theirs) == -signal.SIGKILL
    finally:
        os.close(theirs)


def test_one_whose_parent_lives() -> None:
    assert run(subprocess.DEVNULL) == 7
    assert run(subprocess.PIPE) == 7
