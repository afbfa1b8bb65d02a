"""What happens when a process of the server dies or cannot start. Real deaths, real model."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest
from serving import Server
from traffic import DONE, Event, Started, chat, client_of, counting, follow, is_gone, native, socket_path

from tgi.api.control import EngineLost, EngineReady, Start
from tgi.config import ServerConfig

PROMPT = "The capital of France is"


class Victim:
    """A server that may be harmed; another one is started when it is gone."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._server: Server | None = None

    def get(self) -> Server:
        if self._server is None or self._server.process.poll() is not None:
            sizes = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "40000")
            self._server = Server(*sizes, cache=self._cache)
        return self._server

    def end(self) -> None:
        if self._server is not None:
            self._server.stop()


@pytest.fixture(scope="module")
def victims(model_cache: Path) -> Iterator[Victim]:
    victim = Victim(model_cache)
    yield victim
    victim.end()


@pytest.fixture
def victim(victims: Victim) -> Server:
    return victims.get()


def greedy(server: Server) -> str:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12, "details": True}}
    answer = httpx.post(server.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str([token["id"] for token in answer.json()["details"]["tokens"]])


def is_healthy(server: Server) -> bool:
    return httpx.get(server.url + "/health", timeout=60).status_code == 200


# -- the engine ----------------------------------------------------------------------------------------------------


def test_death_of_the_engine_under_32_streams(victim: Server) -> None:
    expected = greedy(victim)
    before, requests_before = victim.children(), victim.metrics()["tgi_request_count"]
    health_after_first_error: list[int] = []

    async def run() -> tuple[list[list[Event]], list[httpx.Response], httpx.Response]:
        started = Started(32)
        async with client_of(victim.url) as client:
            first_error = asyncio.Event()

            async def stream(path: str, body: Event) -> list[Event]:
                seen = started.stream()

                def on_event(event: Event) -> None:
                    seen(event)
                    if "error" in event:
                        first_error.set()

                return await follow(client, path, body, on_event)

            streams = [
                asyncio.create_task(stream(*(native if number % 2 else chat)(counting(number), 900)))
                for number in range(32)
            ]
            path, body = chat("Hello", 900, stream=False)
            whole = [
                asyncio.create_task(client.post("/generate", json=native(counting(40), 900)[1])),
                asyncio.create_task(client.post(path, json=body)),
            ]
            await started.wait(streams)
            os.kill(before["engine"], signal.SIGKILL)
            await asyncio.wait_for(first_error.wait(), 30)
            health_after_first_error.append((await client.get("/health")).status_code)
            refused = await client.post("/generate", json={"inputs": "Hi"})
            return await asyncio.gather(*streams), await asyncio.gather(*whole), refused

    streams, (whole_native, whole_chat), refused = asyncio.run(run())
    assert health_after_first_error == [503]
    for number, events in enumerate(streams):
        if number % 2:
            *tokens, last = events
            assert (last["error_type"], "was killed by SIGKILL" in last["error"]) == ("generation", True)
            assert [event["index"] for event in tokens] == list(range(1, len(tokens) + 1))
        else:
            last = events[-2]["error"]
            assert events[-1] is DONE
            assert (last["type"], "was killed by SIGKILL" in last["message"]) == ("server_error", True)
    assert (whole_native.status_code, whole_native.json()["error_type"]) == (424, "generation")
    assert (whole_chat.status_code, whole_chat.json()["error"]["type"]) == (500, "server_error")
    assert (refused.status_code, refused.json()["error_type"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) > 0

    victim.wait_for(lambda: is_healthy(victim), "the engine's return")
    assert greedy(victim) == expected
    after, metrics = victim.children(), victim.metrics()
    assert (after["api"], after["engine"] == before["engine"]) == (before["api"], False)
    assert is_gone(before["engine"])
    assert re.search(r"the engine process was killed by SIGKILL.* restart_in_s=0\.5", victim.log)
    assert (metrics["tgi_engine_restarts"], metrics["tgi_requests_in_flight"]) == (1, 0)
    assert metrics["tgi_request_count"] == requests_before + 52  # as TGI counts: chats twice
    victim.wait_for(lambda: victim.metrics()["tgi_kv_blocks_used"] == 0, "free blocks")


# -- the api process -----------------------------------------------------------------------------------------------


def test_death_of_the_api_process(victim: Server) -> None:
    expected = greedy(victim)
    before = victim.children()

    async def run() -> list[list[Event] | BaseException]:
        started = Started(32)
        async with client_of(victim.url) as client:
            # Far longer than it takes to start an api process: what they hold must be freed, not finished.
            streams = [
                asyncio.create_task(follow(client, *native(counting(n), 900), started.stream())) for n in range(32)
            ]
            await started.wait(streams)
            os.kill(before["api"], signal.SIGKILL)
            return await asyncio.gather(*streams, return_exceptions=True)

    assert all(isinstance(outcome, httpx.TransportError) for outcome in asyncio.run(run()))
    # Nobody is refused meanwhile: the port stays open, and connections wait for the next api process.
    assert greedy(victim) == expected
    after = victim.children()
    assert (after["engine"], after["api"] == before["api"]) == (before["engine"], False)
    assert re.search(r"the api process was killed by SIGKILL.* restart_in_s=0\.5", victim.log)
    victim.wait_for(lambda: "again" in victim.log.rsplit("Serving ", 1)[1], "the line that tells")

    def is_idle() -> bool:
        metrics = victim.metrics()
        return metrics["tgi_kv_blocks_used"] == metrics["tgi_batch_current_size"] == metrics["tgi_queue_size"] == 0

    victim.wait_for(is_idle, "blocks of the dead", timeout_s=5)


def test_an_engine_that_is_lost_before_it_answers(model_cache: Path, server: Server) -> None:
    """The api process gives it up when the launcher says so, and takes the next one."""
    messages = [
        EngineReady("/no/such/engine.sock"),
        EngineLost("it died"),
        EngineReady(str(socket_path(server.children()["engine"]))),
    ]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = ServerConfig(cache_dir=str(model_cache))
        api = subprocess.Popen(
            [sys.executable, "-m", "tgi.api.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
        assert api.stdin is not None and api.stdout is not None
        for message in (Start(config, listener.fileno()), *messages):
            api.stdin.write(msgspec.json.encode(message) + b"\n")
        api.stdin.flush()
        try:
            assert b"serving" in api.stdout.readline()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert httpx.get(url + "/health", timeout=60).status_code == 200
            api.terminate()
            assert api.wait(60) == 0
        finally:
            api.kill()
            api.communicate()


# -- the launcher --------------------------------------------------------------------------------------------------


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if not is_gone(pid)]
        time.sleep(0.02)


def test_death_of_the_launcher_leaves_nobody(victim: Server) -> None:
    children = victim.children()
    folder = socket_path(children["engine"]).parent
    victim.process.kill()
    victim.process.wait()
    wait_until_gone(list(children.values()))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("0.0.0.0", victim.port))
        probe.listen()
    shutil.rmtree(folder)  # nobody was left to do it


def test_death_of_the_launcher_while_its_processes_are_starting(model_cache: Path) -> None:
    """They cannot have asked the kernel yet to end with it."""
    server = Server(cache=model_cache, wait=False)
    server.wait_for(lambda: len(server.children()) == 2, "its processes")
    children = server.children()
    folder = socket_path(children["engine"]).parent
    server.process.kill()
    server.process.wait()
    wait_until_gone(list(children.values()))
    shutil.rmtree(folder)


# -- starts that fail ----------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_served(model_cache: Path, tmp_path: Path) -> None:
    server = Server("--model-id", "/no/such/model", cache=model_cache, wait=False, TMPDIR=str(tmp_path))
    server.wait_for(lambda: "api" in server.children() or server.process.poll() is not None, "a process")
    children = list(server.children().values())
    assert server.process.wait(60) == 3
    server.stop()
    errors = [line for line in server.lines if " ERROR " in line]
    assert len(errors) == 1 and "/no/such/model" in errors[0], server.log
    assert "Traceback" not in server.log
    wait_until_gone(children)
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = Server("--port", str(port), "--hostname", "127.0.0.1", wait=False)
        assert server.process.wait(60) == 6
    server.stop()
    (line,) = [line for line in server.lines if " ERROR " in line]
    assert f"Port {port} is in use by another program. Choose another with `--port N` or PORT=N" in line
    assert "load" not in server.log  # it did not load a model first


def test_a_port_that_another_server_takes_while_ours_is_loading(model_cache: Path) -> None:
    """Two sockets may be bound to a port as long as neither listens."""
    server = Server(cache=model_cache, wait=False)
    server.wait_for(lambda: "engine" in server.children(), "the engine")
    children = list(server.children().values())
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", server.port))
        other.listen()
        assert server.process.wait(60) == 6
    server.stop()
    assert f"Port {server.port} is in use by another program" in server.log
    assert "Serving" not in server.log and "Traceback" not in server.log
    wait_until_gone(children)


# -- signals while it starts ---------------------------------------------------------------------------------------


def is_loading(server: Server) -> bool:
    engine = server.children().get("engine")
    return engine is not None and b"libtorch" in Path(f"/proc/{engine}/maps").read_bytes()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("its first line", signal.SIGTERM),
        ("its processes", signal.SIGINT),
        ("torch", signal.SIGTERM),
    ],
)
def test_a_signal_while_it_starts(model_cache: Path, tmp_path: Path, moment: str, number: signal.Signals) -> None:
    reached = {
        "its first line": lambda: bool(server.lines),
        "its processes": lambda: len(server.children()) == 2,
        "torch": lambda: is_loading(server),
    }[moment]
    server = Server(cache=model_cache, wait=False, TMPDIR=str(tmp_path))
    server.wait_for(reached, moment)
    children = list(server.children().values())
    assert server.stop(number) == 0, server.log
    assert "Traceback" not in server.log
    assert "Serving" not in server.log
    wait_until_gone(children)
    assert not list(tmp_path.iterdir())


def test_a_long_temporary_folder_is_no_obstacle(model_cache: Path, tmp_path: Path) -> None:
    """The path of a unix socket is short."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    server = Server(cache=model_cache, TMPDIR=str(folder))
    assert httpx.get(server.url + "/health", timeout=60).status_code == 200
    assert server.stop() == 0


def test_ctrl_c_while_it_starts_reaches_the_launcher_alone(model_cache: Path) -> None:
    """A terminal signals every process of the group."""
    server = Server(cache=model_cache, wait=False)
    server.wait_for(lambda: len(server.children()) == 2, "its processes")
    groups = {os.getpgid(pid) for pid in server.children().values()}
    assert os.getpgid(server.process.pid) not in groups
    assert server.stop(signal.SIGINT) == 0
