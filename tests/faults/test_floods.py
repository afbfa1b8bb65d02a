"""One client floods a pool, another one asks for little: the flood gets a load answer, the other its own.

Clients are told apart by their address, and 127.0.0.2 is another one than 127.0.0.1. Bounds of time tell seconds from
half a minute, no more.
"""

import asyncio
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
from serving import NO_TLS, Server

FLOODER = "127.0.0.2"
LATENCY_S = 8.0  # for an honest request beside a flood; without turns they take half a minute, or fail
REFUSED = {"error": "Model is overloaded", "error_type": "overloaded"}


def client_from(server: Server, address: str | None = None) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        verify=NO_TLS, local_address=address, limits=httpx.Limits(max_connections=None)
    )
    return httpx.AsyncClient(base_url=server.url, timeout=120, transport=transport)


def constrained(schema: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": "Hi", "parameters": {"max_new_tokens": 4, "grammar": {"type": "json", "value": schema}}}


def bomb(name: str) -> dict[str, Any]:
    """Takes all the time that a trial may take."""
    every = {"allOf": [{"type": "string", "pattern": f"{name}{n}"} for n in range(40)]}
    return constrained({"properties": {name: every}, "required": [name]})


def trivial(name: str) -> dict[str, Any]:
    return constrained({"properties": {name: {"type": "integer"}}, "required": [name]})


def large(name: str) -> dict[str, Any]:
    """Harmless, but so long that it must be tried first."""
    names = [f"{name} number {n}" for n in range(200)]
    return constrained({"properties": {key: {"type": "boolean"} for key in names}, "required": names})


def send_and_leave(server: Server, bodies: list[dict[str, Any]]) -> None:
    """Requests whose clients are gone before there is an answer."""
    connections: list[socket.socket] = []
    for body in bodies:
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        connections.append(connection)
    time.sleep(0.3)  # they are read, and wait for the compiler
    for connection in connections:
        connection.close()


def trials(server: Server) -> list[int]:
    """The programs that compile grammars for the api process."""
    api = server.children()["api"]
    pids = [pid for task in Path(f"/proc/{api}/task").iterdir() for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in pids if b"grammar_trial" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    """The seconds until the answer, which is a good one."""
    begin = time.monotonic()
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - begin


def counted(server: Server, result: str) -> float:
    return server.metrics().get(f'tgi_grammar_compilations{{result="{result}"}}', 0)


def test_hard_grammars_of_clients_that_left(server: Server) -> None:
    cancelled = counted(server, "cancelled")
    send_and_leave(server, [bomb(f"left{n}x") for n in range(100)])

    async def run() -> list[float]:
        async with client_from(server) as client:  # from the same address
            return [await ask(client, trivial(f"honest{n}")) for n in range(5)] + [await ask(client, large("honest"))]

    assert max(asyncio.run(run())) < LATENCY_S
    server.wait_for(lambda: counted(server, "cancelled") >= cancelled + 100 and not trials(server), "the queue", 5)
    assert server.metrics()['tgi_worker_queue_size{pool="hard_grammar"}'] == 0
    assert server.metrics()["tgi_requests_in_flight"] == 0


def test_hard_grammars_of_a_client_that_stays(server: Server) -> None:
    """It gets 422 for what was tried and 429 for what was not; nobody else waits for it."""
    refused = server.metrics().get('tgi_worker_queue_refused{pool="hard_grammar"}', 0)

    async def run() -> tuple[list[httpx.Response], list[float]]:
        async with client_from(server, FLOODER) as flooder, client_from(server) as client:
            flood = asyncio.gather(*(flooder.post("/generate", json=bomb(f"stays{n}x")) for n in range(40)))
            await asyncio.sleep(0.5)
            times = [await ask(client, trivial(f"beside{n}")) for n in range(5)]
            times += [await ask(client, large(f"beside{n}")) for n in range(2)]
            return await flood, times

    answers, times = asyncio.run(run())
    assert max(times) < LATENCY_S, times
    tried = [answer for answer in answers if answer.status_code == 422]
    waited = [answer for answer in answers if answer.status_code == 429]
    assert tried and waited and len(tried) + len(waited) == len(answers), [answer.status_code for answer in answers]
    assert all("it takes more than 2 s" in answer.json()["error"] for answer in tried)
    assert all(answer.json() == REFUSED and int(answer.headers["retry-after"]) > 0 for answer in waited)
    metrics = server.metrics()
    assert metrics['tgi_worker_queue_refused{pool="hard_grammar"}'] == refused + len(waited)
    assert not trials(server)


def test_overload_by_grammars_on_the_other_routes(server: Server) -> None:
    """OpenAI's shape, and the event of a native stream that has begun."""
    schema = bomb("other")["parameters"]["grammar"]["value"]

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with client_from(server, FLOODER) as flooder:
            flood = [asyncio.create_task(flooder.post("/generate", json=bomb(f"other{n}x"))) for n in range(100)]
            await asyncio.sleep(0.3)
            native, chat = await asyncio.gather(
                flooder.post("/generate_stream", json=constrained(schema)),
                flooder.post(
                    "/v1/chat/completions",
                    json={
                        "messages": [{"role": "user", "content": "Hi"}],
                        "response_format": {
                            "type": "json_schema",
                            "json_schema": {"name": "x", "schema": {**schema, "description": "another"}},
                        },
                    },
                ),
            )
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            return native, chat

    native, chat = asyncio.run(run())
    assert native.status_code == 200 and json.loads(native.text.removeprefix("data:")) == REFUSED
    error = chat.json()["error"]
    assert (chat.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
    server.wait_for(lambda: not trials(server), "the trials of those who left", 5)


def test_long_texts_of_one_client(server: Server) -> None:
    """Each takes a worker for a while; another client waits for one of them, not for all."""
    word = "Grüße, straße! "
    long = {"inputs": word * 20_000, "parameters": {"max_new_tokens": 4}}
    short = {"inputs": "word " * 500, "parameters": {"max_new_tokens": 2}}

    async def run() -> list[int]:
        async with client_from(server, FLOODER) as flooder, client_from(server) as client:
            flood = [asyncio.create_task(flooder.post("/generate", json=long)) for _ in range(40)]
            while not re.search(r'queue_size\{pool="validate"\} [23]\d', (await client.get("/metrics")).text):
                assert not any(task.done() for task in flood), "there was no flood"
                await asyncio.sleep(0.02)
            waiting: list[int] = []
            for _ in range(2):
                await ask(client, short)
                waiting.append(sum(not task.done() for task in flood))
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            return waiting

    waiting = asyncio.run(run())
    assert min(waiting) > 15, waiting
    server.wait_for(lambda: server.metrics()['tgi_worker_queue_size{pool="validate"}'] == 0, "those who left", 20)
