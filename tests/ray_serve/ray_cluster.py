"""A Ray cluster for tests: the command as a user starts it, by the Python that has Ray."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import httpx2 as httpx
import ray_environment
from serving import NO_TLS, free_port

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
ARGS = {
    "device": "cpu",
    "num_threads": 1,
    "max_total_tokens": 2048,
    "max_batch_total_tokens": 8192,
    "max_concurrent_requests": 6,
    "max_batch_size": 4,
    "min_replicas": 2,
    "max_replicas": 2,
    "replica_gpus": 2,
    "target_usage": 0.5,
    "upscale_delay_s": 0,
    "downscale_delay_s": 1,
    "drain_timeout_s": 60,
}
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 8, "GPU": 4}',  # as Ray counts; the device is a CPU
    "OMP_NUM_THREADS": "1",
    "TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN": "true",  # answers are as long as they were asked for
}


SERVING = "Serving on http://"


class Cluster:
    """`tgi ray` in a process of its own, one that looks at the cluster, and a way to its HTTP port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self._is_stopping = False
        self._serving = threading.Event()  # or ended
        self._folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: paths of sockets are
        kept = {key: value for key, value in os.environ.items() if key not in ("API_KEY", "PORT", "MODEL_ID")}
        self._variables = {**kept, **VARIABLES, "RAY_TMPDIR": self._folder, "PYTHONPATH": str(SOURCES)}
        flags = [word for name, value in ARGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = ["-m", "text_generation_inference.cli", "ray", "--hostname", "127.0.0.1", "--port", str(self.port)]
        self._server = self._start(*command, *flags)
        self._follow(self._server.stdout)  # a full pipe would hold up Ray's threads that print, and then the end
        self._serving.wait(180)
        assert any(line.startswith(SERVING) for line in self.lines), "\n".join(self.lines[-60:])
        self._process = self._start(str(HERE / "cluster_process.py"))

    def _start(self, *arguments: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [ray_environment.PYTHON, *arguments],
            env=self._variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._follow(process.stderr)
        return process

    def _follow(self, stream: TextIO) -> None:
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: TextIO) -> None:
        for line in stream:
            self.lines.append(line.rstrip())
            if line.startswith(SERVING):
                self._serving.set()
        self._serving.set()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        assert line, "\n".join(self.lines[-60:])
        return json.loads(line)

    def ask(self, what: str, given: Any = None) -> Any:
        self._process.stdin.write(json.dumps({what: given}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def deploy(self, **changes: Any) -> Any:
        return self.ask("deploy", {**ARGS, **changes})

    def describe(self) -> dict[str, dict[str, Any]]:
        return {replica["name"]: replica for replica in self.ask("describe")}

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
        end = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < end, f"waited {timeout_s} s for {what}\n" + "\n".join(self.lines[-40:])
            time.sleep(0.2)
        return found

    def wait_for_running(self, number: int) -> None:
        self.wait_for(lambda: self.ask("status") == {"RUNNING": number}, f"{number} replicas")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, verify=NO_TLS)

    def async_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=120, verify=NO_TLS, limits=httpx.Limits(max_connections=64))

    def metrics(self, name: str) -> dict[str, float]:
        """A metric by replica."""
        with self.client() as http:
            lines = http.get("/metrics").raise_for_status().text.splitlines()
        found = [line for line in lines if line.startswith(f'{name}{{replica="')]
        return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in found}

    def tell_to_stop(self) -> None:
        """Once: a second signal would not wait for answers."""
        if not self._is_stopping:
            self._is_stopping = True
            self._server.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """The exit status of `tgi ray`."""
        self._process.stdin.close()
        self.tell_to_stop()
        try:
            for process in (self._process, self._server):
                process.wait(90)
        finally:
            for process in (self._process, self._server):
                process.kill()
                process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._server.returncode
