"""The ingress between a real HTTP server and an ASGI server's calls: what clients get when time is up."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from text_generation_inference.ray_serve.ingress import IngressApp

EVENT = b'data:{"token": 1}\n\n'


class Replicas:
    """Ray's handle of a deployment with one replica, at an address."""

    def __init__(self, address: str) -> None:
        self._chosen = SimpleNamespace(replica_id="one", replica_metadata={"address": address})

    @asynccontextmanager
    async def choose_replica(self, *_: Any, **__: Any) -> AsyncIterator[SimpleNamespace]:
        yield self._chosen


@asynccontextmanager
async def endless_replica() -> AsyncIterator[str]:
    """Streams one event and then waits, or answers never."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENT)
        await asyncio.sleep(60)
        return response

    server = web.Application()
    server.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask_and_cut(path: str) -> tuple[int, bytes]:
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": ("127.0.0.1", 1)}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False}

    async with endless_replica() as address:
        app = IngressApp(Replicas(address), "test", False)
        task = asyncio.create_task(app(scope, receive, sent.put))
        while not (path == "/generate" or sent.qsize() >= 2):  # the head and the first event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert app.drain() == 1
        app.cut()
        await asyncio.wait_for(task, 5)
        assert app.drain() == 0
        messages = [sent.get_nowait() for _ in range(sent.qsize())]
        await app.close()
    assert messages[-1]["more_body"] is False
    return messages[0]["status"], b"".join(message["body"] for message in messages[1:])


@pytest.mark.parametrize(
    ("path", "field"), [("/generate_stream", "error_type"), ("/v1/chat/completions", "error")]
)  # fmt: skip
def test_a_stream_that_is_cut_ends_with_an_error_event(path: str, field: str) -> None:
    status, body = asyncio.run(ask_and_cut(path))
    assert status == 200 and body.startswith(EVENT)
    event = json.loads(body.removeprefix(EVENT).strip().removeprefix(b"data:"))
    assert "shutting down" in json.dumps(event) and field in event


def test_an_answer_that_has_not_begun_is_a_refusal() -> None:
    status, body = asyncio.run(ask_and_cut("/generate"))
    assert status == 503 and "shutting down" in json.loads(body)["error"]


def test_a_client_that_leaves_is_not_answered() -> None:
    async def run() -> None:
        sent: list[Any] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async with endless_replica() as address:
            app = IngressApp(Replicas(address), "test", False)
            scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
            task = asyncio.create_task(app(scope, receive, send))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert app.drain() == 0 and not sent
            await app.close()

    asyncio.run(run())
