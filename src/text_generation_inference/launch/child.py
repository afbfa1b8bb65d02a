"""A process that the launcher keeps running: starting it, seeing that it hangs, ending it, counting its failures."""

import asyncio
import logging
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from text_generation_inference.engine.heartbeat import Watch
from text_generation_inference.launch.hangs import find_hang

log = logging.getLogger("text_generation_inference.launch")

MAX_FAILURES = 6  # in a row
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_GOOD_RUN_S = 60.0  # a process that lived this long had no failure in a row


class Child:
    """What it wrote last, and how often it failed in a row."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self._environment = environment
        self.process: asyncio.subprocess.Process | None = None
        self.last_words: deque[str] = deque(maxlen=20)
        self.failures = 0
        self.hang = ""  # why the launcher ended it
        self._watch: Watch | None = None

    async def start(self, module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        self.last_words.clear()
        self.hang = ""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**22,
            env=self._environment,
            start_new_session=True,  # Ctrl-C, or a signal to the launcher's group, is the launcher's to act upon
            **options,
        )
        return self.process

    def watch(self, heartbeat: Path) -> None:
        """From now on a hang is seen."""
        self.stop_watching()
        self._watch = Watch(heartbeat)

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def find_hang(self) -> str | None:
        if self._watch is None or self.process is None or self.process.returncode is not None or self.hang:
            return None
        return find_hang(self._watch, self.process.pid)

    def send_signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def stop(self, number: signal.Signals, patience_s: float) -> None:
        """End it with a signal, or SIGKILL if that takes too long."""
        if self.process is None or self.process.returncode is not None:
            return
        self.send_signal(number)
        try:
            await asyncio.wait_for(self.process.wait(), patience_s)
        except TimeoutError:
            log.error("The %s process did not end in time: killed", self.name)
            self.send_signal(signal.SIGKILL)
            await self.process.wait()

    def describe_end(self, status: int) -> str:
        if self.hang:
            return f"the {self.name} process {self.hang}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        return f"the {self.name} process {how}"  # clients are told: what it said last is in the log alone

    def fail(self, started: float) -> None:
        """Count a failure of one that has run since `started`."""
        self.failures = 1 if time.monotonic() - started > _GOOD_RUN_S else self.failures + 1

    def pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self.failures - 1, MAX_FAILURES))
