"""A real server for tests: the launcher as a user starts it, on a free port."""

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx

READY = re.compile(r"Serving .* on http://")
# A client without one reads all certificates of the machine, which takes 25 ms; nothing here is encrypted.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
NUM_RANKS = int(os.environ.get("NUM_SHARD", "1"))  # of every server here that is not told otherwise: `make test-ranks`
_BOUND = re.compile(r'tgi_api_loop_lag_seconds_bucket\{le="([0-9.e-]+)"\}')


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`text-generation-launcher` in a process of its own."""

    def __init__(
        self,
        *arguments: str,
        wait: bool = True,
        cache: Path | None = None,
        program: tuple[str, ...] = ("-m", "text_generation_inference.launch.command"),
        **environment: str,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self._serving = threading.Event()  # or ended
        self._ready = False
        self._folder = tempfile.TemporaryDirectory()
        command = [
            sys.executable,
            *program,
            "--port",
            str(self.port),
            *arguments,
        ]
        kept = {key: value for key, value in os.environ.items() if key not in ("API_KEY", "PORT", "MODEL_ID")}
        if cache is not None:
            environment["TGI_CACHE_DIR"] = str(cache)
        self.process = subprocess.Popen(
            command,
            env={**kept, **environment},
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.wait_until_serving()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if READY.search(line):
                self._ready = True
                self._serving.set()
        self._serving.set()

    def wait_until_serving(self, timeout_s: float = 120) -> None:
        assert self._serving.wait(timeout_s), "\n".join(self.lines)
        assert self._ready, "\n".join(self.lines)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> dict[str, int]:
        """Process ids by role: `engine` and `api`."""
        found: dict[str, int] = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread or a process that has just ended
                for pid in (task / "children").read_text().split():
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    for role, module in (("engine", b"engine"), ("api", b"api.process")):
                        if b"text_generation_inference." + module in command:
                            found[role] = int(pid)
        return found

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, verify=NO_TLS, **options)

    def metrics(self) -> dict[str, float]:
        """Every sample without its labels' quotes: `name{a="b"}` -> value."""
        text = httpx.get(self.url + "/metrics", timeout=30, verify=NO_TLS).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def num_late(self) -> float:
        """How often the event loop of the api process was held up for a quarter of a second (of a third, exactly)."""
        metrics = self.metrics()
        if "tgi_api_loop_lag_seconds_count" not in metrics:  # a server so young that its loop was not looked at yet
            return 0
        bounds = [(float(_BOUND.search(name)[1]), value) for name, value in metrics.items() if _BOUND.search(name)]
        return metrics["tgi_api_loop_lag_seconds_count"] - min(pair for pair in bounds if pair[0] >= 0.25)[1]

    def wait_for(self, condition, what: str, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"waited {timeout_s} s for {what}\n{self.log[-3000:]}"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        self._folder.cleanup()
        return status
