# pyright: basic, reportMissingImports=false
"""Processes that compile kernels. They take a while to be ready: they may be started before Triton is imported here."""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue


class Workers:
    """One `compile_worker` for each thread that asks, started when it first does; some may have been started before."""

    def __init__(self, count: int = 0) -> None:
        """Needs no GPU."""
        self._command = [sys.executable, "-m", "text_generation_inference.kernels.triton.compile_worker"]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._own = threading.local()
        self._waiting: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._early: dict[str, threading.Thread] = {}
        self._started: list[subprocess.Popen[str]] = []
        with suppress(OSError):
            for _ in range(count):
                self._waiting.put(self._start())

    def begin(self, described: str) -> None:
        """Like `compile`, which waits for the same kernel later; nothing is waited for here."""
        if described not in self._early:
            self._early[described] = threading.Thread(target=self._compile, args=(described,), daemon=True)
            self._early[described].start()

    def compile(self, described: str) -> None:
        """Leaves the kernel on disk, if all goes well."""
        begun = self._early.get(described)
        if begun is not None:
            begun.join()
        else:
            self._compile(described)

    def _compile(self, described: str) -> None:
        with suppress(OSError):
            worker = getattr(self._own, "worker", None)
            if worker is None:
                worker = self._own.worker = self._take()
            worker.stdin.write(described + "\n")
            worker.stdin.flush()
            worker.stdout.readline()

    def close(self) -> None:
        """What was begun and never asked for is given up."""
        for worker in self._started:
            worker.kill()
        for thread in self._early.values():
            thread.join()
        for worker in self._started:
            worker.wait()
            with suppress(OSError):
                worker.stdin.close()  # pyright: ignore
            worker.stdout.close()  # pyright: ignore
        self._started = []

    def _take(self) -> "subprocess.Popen[str]":
        try:
            worker = self._waiting.get_nowait()
        except Empty:
            worker = self._start()
        from triton.runtime import driver

        target = driver.active.get_current_target()
        worker.stdin.write(json.dumps([target.backend, target.arch, target.warp_size]) + "\n")  # pyright: ignore
        return worker

    def _start(self) -> "subprocess.Popen[str]":
        worker = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._started.append(worker)
        return worker
