"""A small application behind the server's own HTTP protocol, in this process: limits of time and size are the test's."""

import asyncio
import json
import socket
import threading
from contextlib import nullcontext
from functools import partial

import uvicorn
import uvloop

from text_generation_inference.api.connections import BodyBudget, Connections
from text_generation_inference.api.http import (
    ClientGoneError,
    Connection,
    HttpError,
    HttpRequest,
    json_response,
    text_response,
)
from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.protocol import LimitedProtocol


class ServedHere:
    """A context in which `port` answers. `/tokenize` answers with its text, `/large?N` with N bytes, `/slow` in a while."""

    def __init__(self, connections: int = 1000, spare: int = 100, payload_limit: int = 2_000_000) -> None:
        self.metrics = Metrics(1000, 1000)
        self.connections = Connections(connections, spare, self.metrics)
        self.bodies = BodyBudget(payload_limit, self.metrics)
        self.payload_limit = payload_limit
        self.num_gone = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))

    def __enter__(self) -> "ServedHere":
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        protocol = partial(LimitedProtocol, self.connections)
        config = uvicorn.Config(
            self._answer,
            http=protocol,
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = nullcontext  # type: ignore[method-assign]
        serving = asyncio.create_task(self._server.serve([self._sock]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._started.set()
        while not serving.done():
            await asyncio.sleep(0.05)
            self.connections.check_progress()

    def on_loop(self, action) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(action)

    async def _answer(self, scope, receive, send) -> None:
        request = HttpRequest(scope, receive, self.payload_limit, self.bodies)
        connection = Connection(send, [])
        task = asyncio.current_task()
        assert task is not None
        request.watch(task, lambda: connection.complete)
        try:
            await connection.respond(await self._route(request, scope))
        except HttpError as error:
            await connection.respond(text_response(error.status, error.text, error.headers))
        except (ClientGoneError, asyncio.CancelledError):
            self.num_gone += 1
        finally:
            request.stop_watching()

    async def _route(self, request: HttpRequest, scope):
        kind = (request.method.replace("HEAD", "GET"), request.path)
        if kind == ("POST", "/tokenize"):
            return json_response([{"text": json.loads(await request.read_json())["inputs"]}])
        if kind == ("POST", "/slow"):
            await request.read_body()
            await asyncio.sleep(1)
            return text_response(200, "done")
        if kind == ("GET", "/large"):
            return text_response(200, "x" * int(scope["query_string"]))
        if request.path in ("/health", "/v1/models", "/info", "/"):
            return json_response({"object": "list"}) if request.method in ("GET", "HEAD") else text_response(405, "")
        return text_response(404, "")
