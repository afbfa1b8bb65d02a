"""Running the server: stopping it in order, what listens, what the logs say and never say, comments on idle streams."""

import ast
import asyncio
import json
import os
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import httpx2 as httpx
import pytest
import uvicorn
from serving import NO_TLS, Server
from traffic import (
    DONE,
    Event,
    Started,
    chat,
    client_of,
    counting,
    follow,
    is_gone,
    native,
    running,
    socket_path,
    stopped,
)

from text_generation_inference.api.app import App
from text_generation_inference.api.http import KEEP_ALIVE_S
from text_generation_inference.api.service import Service
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.client import EngineClient

SIZES = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
SOURCES = Path(__file__).parents[2] / "src" / "text_generation_inference"


# -- stopping ------------------------------------------------------------------------------------------------------


def test_stopping_under_load_loses_nothing(model_cache: Path) -> None:
    with running(*SIZES, cache=model_cache) as server:
        children, folder = server.children(), socket_path(server.children()["engine"]).parent
        new_tokens = 60

        async def run() -> tuple[list[list[Event]], list[httpx.Response], list[httpx.Response]]:
            started = Started(8)
            async with client_of(server.url) as client:
                streams = [
                    asyncio.create_task(
                        follow(client, *(native if n % 2 else chat)(counting(n), new_tokens), started.stream())
                    )
                    for n in range(8)
                ]
                path, body = chat(counting(9), new_tokens, stream=False)
                whole = [
                    asyncio.create_task(client.post("/generate", json=native(counting(8), new_tokens)[1])),
                    asyncio.create_task(client.post(path, json=body)),
                ]
                await started.wait(streams)
                # Every process gets it, as when a service is stopped by its control group.
                for pid in (server.process.pid, *children.values()):
                    os.kill(pid, signal.SIGTERM)
                while (health := await client.get("/health")).status_code == 200:
                    await asyncio.sleep(0.01)
                late = [
                    health,
                    await client.post("/generate", json={"inputs": "Hi"}),
                    await client.post(path, json=body),
                    await client.get("/v2/health/ready"),
                ]
                assert not all(task.done() for task in streams), "the answers were over before the server was stopped"
                return await asyncio.gather(*streams), await asyncio.gather(*whole), late

        streams, whole, late = asyncio.run(run())
        assert server.process.wait(60) == 0, server.log
        for number, events in enumerate(streams):
            if number % 2:
                assert len(events) == new_tokens and events[-1]["generated_text"]
            else:
                assert events[-1] is DONE and events[-2]["choices"][0]["finish_reason"] == "length"
        assert [answer.status_code for answer in whole] == [200, 200]
        assert [answer.status_code for answer in late] == [503] * 4
        assert late[1].json() == {"error": "the server is shutting down", "error_type": "unavailable"}
        assert late[2].json()["error"]["message"] == "the server is shutting down"
        assert all(is_gone(pid) for pid in children.values())
        assert not folder.exists()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health", verify=NO_TLS)
        server.stop()
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_other_signals_that_end_programs_drain_too(model_cache: Path, number: signal.Signals) -> None:
    with running(*SIZES, cache=model_cache) as server:
        pids, folder = (
            [server.process.pid, *server.children().values()],
            socket_path(server.children()["engine"]).parent,
        )

        async def run() -> list[Event]:
            started = Started(1)
            async with client_of(server.url) as client:
                stream = asyncio.create_task(follow(client, *native(counting(1), 60), started.stream()))
                await started.wait([stream])
                for pid in pids:  # a service manager signals all of them
                    os.kill(pid, number)
                return await stream

        events = asyncio.run(run())
        assert len(events) == 60 and events[-1]["generated_text"]
        assert server.process.wait(60) == 0, server.log
        assert not folder.exists()


def test_a_closed_window_does_not_end_what_runs_under_nohup(model_cache: Path) -> None:
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it to what it starts
    try:
        server = Server(*SIZES, cache=model_cache)
    finally:
        signal.signal(signal.SIGHUP, usual)
    try:
        for pid in (server.process.pid, *server.children().values()):
            os.kill(pid, signal.SIGHUP)
        time.sleep(0.5)
        assert httpx.get(server.url + "/health", timeout=60, verify=NO_TLS).status_code == 200
        assert "stopping" not in server.log
    finally:
        assert server.stop() == 0, server.log


def test_a_second_signal_ends_at_once(model_cache: Path) -> None:
    with running(*SIZES, cache=model_cache) as server:
        children, folder = server.children(), socket_path(server.children()["engine"]).parent

        async def run() -> None:
            started = Started(1)
            async with client_of(server.url) as client:
                stream = asyncio.create_task(follow(client, *native(counting(1), 900), started.stream()))
                await started.wait([stream])
                server.process.send_signal(signal.SIGTERM)
                while (await client.get("/health")).status_code == 200:
                    await asyncio.sleep(0.01)
                server.process.send_signal(signal.SIGINT)
                with pytest.raises(httpx.TransportError):
                    await stream

        asyncio.run(run())
        assert server.process.wait(60) == 128 + signal.SIGINT
        server.wait_for(lambda: all(is_gone(pid) for pid in children.values()), "their end")
        assert not folder.exists()
        assert "Traceback" not in server.log


# -- one server with every log line it can write -------------------------------------------------------------------

KEY = "correct-horse-battery-staple"
SECRET_WORDS = "zanzibarquokka"
BAD_GRAMMAR = {"type": "regex", "value": f"({SECRET_WORDS}"}
SPY = """
import pickle, sys
def used(*args, **kwargs):
    with open({path!r}, "a") as file:
        file.write(" ".join(sys.orig_argv) + "\\n")
    raise AssertionError("unpickled")
pickle.load = pickle.loads = used
pickle.Unpickler = type("Unpickler", (pickle.Unpickler,), {{"load": used}})
pickle._Unpickler.load = used
with open({path!r} + ".on", "a") as file:
    file.write(" ".join(sys.orig_argv) + "\\n")
"""


@pytest.fixture(scope="module")
def spy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules that make every process of a server write down whoever unpickles something."""
    folder = tmp_path_factory.mktemp("spy")
    (folder / "sitecustomize.py").write_text(SPY.format(path=str(folder / "unpickled")))
    return folder


@pytest.fixture(scope="module")
def logged(model_cache: Path, spy_folder: Path) -> Iterator[Server]:
    search = os.pathsep.join(filter(None, (str(spy_folder), os.environ.get("PYTHONPATH"))))
    arguments = ("--json-output", "--api-key", KEY, "--graceful-termination-timeout", "1")
    server = Server(*SIZES, *arguments, cache=model_cache, LOG_LEVEL="debug", PYTHONPATH=search)
    yield server
    server.stop()


def sockets_of(pid: int) -> set[str]:
    links = (f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))
    return {os.readlink(link) for link in links if os.path.islink(link)}


@pytest.mark.one_rank  # sums connect over the loopback interface: test_ranks_http.py
def test_only_the_http_port_listens(logged: Server) -> None:
    listening: set[int] = set()
    for pid in (logged.process.pid, *logged.children().values()):
        inodes = sockets_of(pid)
        for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                is_server = state == "0A" or not table.startswith("tcp")
                if is_server and f"socket:[{rest[5]}]" in inodes:
                    listening.add(int(local.rsplit(":", 1)[1], 16))
    assert listening == {logged.port}


def test_sockets_are_private(logged: Server) -> None:
    path = socket_path(logged.children()["engine"])
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_log_of_a_whole_life(logged: Server, spy_folder: Path) -> None:
    """Success, bad requests, a wrong key, a dropped connection, a lost engine, and Ctrl-C while something runs."""
    generated: list[str] = []

    async def run() -> list[list[Event]]:
        async with client_of(logged.url) as client:
            client.headers["authorization"] = f"Bearer {KEY}"
            path, body = chat(SECRET_WORDS, 8, stream=False)
            parameters = {"max_new_tokens": 8, "stop": [SECRET_WORDS], "details": True}
            answers = [
                await client.post("/generate", json={"inputs": SECRET_WORDS, "parameters": parameters}),
                await client.post(path, json=body),
                await client.post("/v1/completions", json={"prompt": SECRET_WORDS, "max_tokens": 8}),
                await client.post("/tokenize", json={"inputs": SECRET_WORDS}),
                await client.post("/generate", json={"inputs": SECRET_WORDS, "parameters": {"temperature": -1.0}}),
                await client.post("/generate", json={"inputs": SECRET_WORDS * 500}),
                await client.post("/generate", content=b'{"inputs": "' + SECRET_WORDS.encode() + b'"'),
                await client.post("/generate", json={"inputs": [SECRET_WORDS]}),
                await client.post(path, json={**body, "tool_choice": {"function": {"name": SECRET_WORDS}}}),
                await client.post("/generate", json={"inputs": "x", "parameters": {"grammar": BAD_GRAMMAR}}),
                await client.post(path, json={**body, "response_format": {"type": SECRET_WORDS}}),
                await client.post("/generate", json={"inputs": "x"}, headers={"authorization": "Bearer wrong-key-1"}),
                await client.get(f"/{SECRET_WORDS}"),
            ]
            statuses = [answer.status_code for answer in answers]
            assert statuses[:5] == [200, 200, 200, 200, 422]
            assert all(400 <= status < 500 for status in statuses[5:]), statuses
            assert statuses[-2] == 401
            generated.append(answers[0].json()["generated_text"])
            async with client.stream("POST", "/generate_stream", json=native(SECRET_WORDS, 900)[1]) as stream:
                await anext(aiter(stream.aiter_lines()))  # and away
            engine = logged.children()["engine"]
            os.kill(engine, signal.SIGKILL)
            await asyncio.to_thread(logged.wait_for, lambda: "The engine is back" in logged.log, "the engine's return")
            started = Started(2)
            streams = [
                asyncio.create_task(follow(client, *native(counting(1), 900), started.stream())),
                asyncio.create_task(follow(client, *chat(counting(2), 900), started.stream())),
            ]
            await started.wait(streams)
            logged.process.send_signal(signal.SIGINT)
            return await asyncio.gather(*streams)

    native_events, chat_events = asyncio.run(run())
    assert native_events[-1] == {
        "error": "Request failed during generation: the server is shutting down",
        "error_type": "generation",
    }
    assert chat_events[-2]["error"]["message"].endswith("the server is shutting down")
    assert chat_events[-1] is DONE
    assert logged.process.wait(60) == 0, logged.log
    logged.stop()

    lines = [json.loads(line) for line in logged.lines]
    assert all(isinstance(line, dict) and {"timestamp", "level"} <= line.keys() for line in lines)
    levels = {line["level"] for line in lines}
    assert {"DEBUG", "INFO", "WARN", "ERROR"} <= levels, "the server did not log at every level"
    for text in (KEY, SECRET_WORDS, SECRET_WORDS[:8], "wrong-key-1", generated[0].strip()):
        assert text not in logged.log.replace(f"/{SECRET_WORDS}", "/path"), text
    assert "Traceback" not in logged.log

    spied = (spy_folder / "unpickled.on").read_text()
    for process in (
        "text_generation_inference.launch.command",
        "text_generation_inference.engine",
        "text_generation_inference.api.process",
    ):
        assert process in spied
    assert not (spy_folder / "unpickled").exists(), (spy_folder / "unpickled").read_text()


# -- pickle --------------------------------------------------------------------------------------------------------

UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
UNPICKLING_CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}


def unpickling(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in UNPICKLERS)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in UNPICKLERS:
                yield module
            case ast.Attribute(attr=name) if name in UNPICKLING_CALLS:
                yield name
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield "torch.load"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield "allow_pickle"


def test_the_sources_never_unpickle() -> None:
    found = {str(path): list(unpickling(ast.parse(path.read_text()))) for path in SOURCES.rglob("*.py")}
    assert len(found) > 50
    assert not {path: names for path, names in found.items() if names}


def test_the_search_for_unpickling_finds_it() -> None:
    program = "import pickle\nfrom multiprocessing.pool import Pool\ntorch.load(x)\nnp.load(x, allow_pickle=True)\ns.recv_pyobj()"
    assert sorted(unpickling(ast.parse(program))) == [
        "allow_pickle",
        "multiprocessing.pool",
        "pickle",
        "recv_pyobj",
        "torch.load",
    ]


# -- comments on idle streams --------------------------------------------------------------------------------------


@asynccontextmanager
async def served_here(engine_pid: int) -> AsyncIterator[tuple[App, httpx.AsyncClient]]:
    """The application in this process, so that the clock is ours, on the engine of a server."""
    engine = EngineClient(socket_path(engine_pid))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        try:
            service = Service(ServerConfig(), await engine.connect(30))
            service.attach(engine, service.facts)
            app = App(service)
            http_server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error", log_config=None))
            http_server.capture_signals = nullcontext  # type: ignore[method-assign]
            serving = asyncio.create_task(http_server.serve([sock]))
            while not http_server.started:
                await asyncio.sleep(0.01)
            async with client_of(f"http://127.0.0.1:{sock.getsockname()[1]}") as client:
                yield app, client
            http_server.should_exit = True
            await serving
            service.close()
        finally:
            await engine.close()


FIRST_ENDS_EARLY: Event = {
    "prompt": [counting(1), counting(2000)],
    "stop": [" 9,"],
    "max_tokens": 40,
    "temperature": 0,
    "stream": True,
}


@pytest.mark.parametrize(
    ("asked", "until"),
    [
        (native(counting(1), 24), ""),
        (chat(counting(1), 24), ""),
        (chat(counting(1), 24, n=2, seed=1, temperature=1.0), ""),
        (("/v1/completions", FIRST_ENDS_EARLY), '"finish_reason":"stop"'),
    ],
    ids=["native", "chat", "choices", "first-of-two-has-ended"],
)
def test_a_silent_stream_gets_a_comment_and_goes_on(server: Server, asked: tuple[str, Event], until: str) -> None:
    engine_pid = server.children()["engine"]
    path, body = asked

    async def run() -> tuple[list[str], list[str]]:
        async with served_here(engine_pid) as (app, client):
            undisturbed = (await client.post(path, json=body)).text.splitlines()
            async with client.stream("POST", path, json=body) as response:
                lines = response.aiter_lines()
                seen = [await anext(lines)]
                while until not in seen[-1]:
                    seen.append(await anext(lines))
                with stopped(engine_pid):
                    while ":" not in seen:
                        app.keep_alive(time.monotonic() + KEEP_ALIVE_S, KEEP_ALIVE_S)
                        seen.append(await asyncio.wait_for(anext(lines), 10))
                return undisturbed, seen + [line async for line in lines]

    undisturbed, lines = asyncio.run(run())
    assert num_events(lines) == num_events(undisturbed)


def num_events(lines: list[str]) -> int:
    return sum(line.startswith("data:") for line in lines)


def test_a_stream_that_is_not_silent_gets_none(server: Server) -> None:
    with server.client() as client:
        path, body = native(counting(3), 40)
        assert not any(line.startswith(":") for line in client.post(path, json=body).text.splitlines())


def test_comments_come_before_usual_proxies_give_up() -> None:
    assert KEEP_ALIVE_S < 30
