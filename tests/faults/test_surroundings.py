"""What is around a server and not of its making: a log that nobody reads, a container's limit on memory."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import NO_TLS, Server, free_port
from traffic import client_of

GIB = 1 << 30
PROMPT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 12}}


# -- a pipe that nobody reads --------------------------------------------------------------------------------------


def test_a_log_that_nobody_reads_does_not_hold_requests_up(server: Server, model_cache: Path) -> None:
    expected = httpx.post(server.url + "/generate", json=PROMPT, timeout=60, verify=NO_TLS).json()
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "text_generation_inference.launch.command",
        "--port",
        str(port),
        "--max-total-tokens",
        "1024",
    ]
    environment = {**os.environ, "TGI_CACHE_DIR": str(model_cache), "LOG_LEVEL": "debug"}
    unread = subprocess.Popen([*command, "--max-batch-total-tokens", "8192"], env=environment, stderr=subprocess.PIPE)

    async def run() -> list[int]:
        async with client_of(f"http://127.0.0.1:{port}") as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
            # A pipe holds 64 KiB, some 450 lines of these.
            return [(await client.get(f"/{'x' * 100}")).status_code for _ in range(1500)]

    try:
        assert set(asyncio.run(asyncio.wait_for(run(), 120))) == {404}
        answer = httpx.post(f"http://127.0.0.1:{port}/generate", json=PROMPT, timeout=60, verify=NO_TLS)
        assert answer.json() == expected
        unread.send_signal(signal.SIGTERM)
        assert unread.wait(60) == 0
    finally:
        unread.kill()
        unread.communicate()


# -- control groups ------------------------------------------------------------------------------------------------


class Group:
    """A control group of 2 GiB, below the one of this process."""

    def __init__(self) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        paths = {controllers: path.lstrip("/") for _, controllers, path in lines}
        root = Path("/sys/fs/cgroup")
        self.is_new = "memory" not in paths
        parent = root / paths.get("", "") if self.is_new else root / "memory" / paths["memory"]
        self.path = parent / f"tgi-test-{os.getpid()}"
        self.path.mkdir()
        try:
            name = "memory.max" if self.is_new else "memory.limit_in_bytes"
            (self.path / name).write_text(str(2 * GIB))
        except OSError:
            self.path.rmdir()
            raise

    def num_killed(self) -> int:
        text = (self.path / ("memory.events" if self.is_new else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text("0")


@pytest.fixture
def group() -> Iterator[Group]:
    try:
        found = Group()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield found
    found.path.rmdir()


def test_a_server_in_two_gigabytes(group: Group, model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts with a cache that fits, and takes load without being killed."""
    usual = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: usual(*args, preexec_fn=group.enter, **named))
    server = Server(cache=model_cache)
    monkeypatch.undo()
    try:
        children = server.children()
        blocks = server.metrics()["tgi_kv_blocks_total"]
        assert blocks * 16 * 46_080 < GIB, server.log  # bytes of a token in the cache of this model
        num_requests = min(12, int(blocks * 16 / 600) + 2)

        async def run() -> list[int]:
            async with client_of(server.url) as client:
                bodies = [
                    {"inputs": f"{n} " * 280, "parameters": {"max_new_tokens": 8}}
                    for n in range(100, 100 + num_requests)
                ]
                answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
                return [answer.status_code for answer in answers]

        assert set(asyncio.run(run())) == {200}
        assert server.children() == children
        assert group.num_killed() == 0
    finally:
        assert server.stop() == 0, server.log
