"""Ties a process to the one that started it."""

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens. Linux only; elsewhere nothing."""
    parent = os.getppid()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent or _nobody_listens():  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def _nobody_listens() -> bool:
    """Standard output is a pipe whose other end is closed: its owner died while this interpreter was starting."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # it is, where a process has none
        return False
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
