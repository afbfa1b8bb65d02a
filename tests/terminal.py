"""Runs a command on a terminal of a given size."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence


def run_on_terminal(command: Sequence[str], columns: int, rows: int = 50, timeout_s: float = 120) -> tuple[int, str]:
    """Its exit status and what it wrote to the terminal, standard error included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**kept, "TERM": "dumb"})
    os.close(theirs)
    pieces: list[bytes] = []
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    piece = os.read(ours, 65536)
                except OSError:  # closed at the other end
                    break
                if not piece:
                    break
                pieces.append(piece)
        return process.wait(10), b"".join(pieces).decode(errors="replace").replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
