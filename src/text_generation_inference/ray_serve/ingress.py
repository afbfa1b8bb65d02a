"""From Ray's proxy to a replica's api process and back, bytes as they are.

A request is read, given a replica, and sent there over HTTP; the answer's bytes go back as they come. Ray keeps a slot
on the replica meanwhile. A client that leaves cancels the task, which closes the connection to the api process, which
ends the generation. Until something of an answer was sent back the request can go to another replica: when the one it
had is lost, or says that it is full or not ready. Later, a stream ends with an error event, as a server's own does when
its engine is lost.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
from yarl import URL

from text_generation_inference.api.error_shapes import shape_of
from text_generation_inference.api.errors import UnavailableError
from text_generation_inference.api.metrics import CONTENT_TYPE
from text_generation_inference.errors import EngineError, TgiError
from text_generation_inference.ray_serve import metrics_text
from text_generation_inference.ray_serve.prompt_of_body import NO_PROMPT, key_of_body
from text_generation_inference.ray_serve.replica import CLIENT_HEADER
from text_generation_inference.ray_serve.routing_books import books_of
from text_generation_inference.router import PromptKey

log = logging.getLogger("text_generation_inference.ray_serve")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_KEPT_BYTES = 4 * 2**20  # of a body: what is longer goes to one replica only, and its beginning decides which
MAX_TRIES = 3
REPLICA_HEADER = b"x-replica-id"  # of answers: who gave it
_LEAST_WHOLE = 2**20  # an answer of known length up to this goes back in one piece
_WAIT_FOR_REPLICA_S = 300.0  # one may have to start
_LOOK_FOR_REPLICA_S = 2.0  # those who only ask how things are do not wait for a start
_CONNECT_S = 10.0
_IDLE_S = 30.0  # shorter than the api process keeps connections open
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection")
)
_NOT_SENT_BACK = _HOP_BY_HOP | {b"date", b"x-request-id"}  # Ray's proxy writes both; the id is that which it sent on
_NOT_SENT_ON = _HOP_BY_HOP | {b"content-length", b"expect", CLIENT_HEADER.encode()}
_ELSEWHERE = (429, 503)  # another replica may have room


class _LostError(Exception):
    """The replica did not answer, and nothing was sent back yet."""


class _Request:
    """A request as it came: head, and as much of the body as was read."""

    def __init__(self, scope: Message, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        root = scope.get("root_path", "").rstrip("/").encode()
        path = path.removeprefix(root) if root and path.startswith(root + b"/") else path
        self.path = path.decode("latin-1")
        query = scope.get("query_string", b"")
        self.target = self.path + (f"?{query.decode('latin-1')}" if query else "")
        client = scope.get("client")
        self.headers: list[tuple[bytes, bytes]] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        self.client: str = client[0] if client else ""
        self.body = b""
        self.is_complete = False

    async def read(self) -> None:
        """The body, up to `MAX_KEPT_BYTES` and a piece."""
        pieces: list[bytes] = []
        size = 0
        while not self.is_complete and size <= MAX_KEPT_BYTES:
            piece = await self._next_piece()
            pieces.append(piece)
            size += len(piece)
        self.body = b"".join(pieces)

    async def _next_piece(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        self.is_complete = not message.get("more_body", False)
        return message.get("body", b"")

    def data(self) -> Any:
        """The body, for the way on."""
        if self.is_complete:
            return self.body or None
        return self._pieces()

    async def _pieces(self) -> Any:
        yield self.body
        while not self.is_complete:
            yield await self._next_piece()

    def headers_on(self) -> list[tuple[str, str]]:
        kept = [(name, value) for name, value in self.headers if name.lower() not in _NOT_SENT_ON]
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in kept]
        return [*named, (CLIENT_HEADER, self.client)] if self.client else named


class IngressApp:
    """The ASGI application of the ingress: every path of the API."""

    def __init__(self, replicas: Any, deployment: str, salt_by_key: bool) -> None:
        """`replicas`: Ray's handle of their deployment, whose name is `deployment`."""
        self._replicas = replicas
        self._books = books_of(deployment)
        self._salt_by_key = salt_by_key
        self._session: aiohttp.ClientSession | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._num_requests = 0  # under way
        self._is_draining = False

    def drain(self) -> int:
        """Take no more requests. How many are under way; asked again until there are none."""
        self._is_draining = True
        return self._num_requests

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the start: Ray looks for replicas only when it is asked for one
            self._meeting = asyncio.create_task(self._meet_replicas())
        if scope["type"] != "http":
            return
        request = _Request(scope, receive)
        self._num_requests += 1
        try:
            await self._answer(request, send)
        finally:
            self._num_requests -= 1

    async def _meet_replicas(self) -> None:
        """From here on the books know all that are there."""
        async with self._replicas.choose_replica(NO_PROMPT):
            pass

    async def _answer(self, request: _Request, send: Send) -> None:
        await request.read()
        if request.path == "/metrics" and request.method == "GET":
            await self._send_metrics(send)
            return
        if self._is_draining:
            await _send_error(send, request, UnavailableError("the server is shutting down"))
            return
        key = NO_PROMPT
        if request.method == "POST":
            key = key_of_body(request.body, dict(request.headers), self._salt_by_key)
        avoid: list[str] = []
        while True:
            # What was read in part cannot be sent twice.
            last_try = len(avoid) + 1 >= MAX_TRIES or not request.is_complete
            try:
                if await self._forward(request, key, avoid, last_try, send):
                    return
            except _LostError as error:
                if last_try:
                    await _send_error(send, request, EngineError(f"the replica was lost: {error}"))
                    return
            except TimeoutError:
                await _send_error(send, request, UnavailableError("no replica is up"))
                return

    async def _forward(self, request: _Request, key: PromptKey, avoid: list[str], last_try: bool, send: Send) -> bool:
        """Send it to a replica. False: another one should be tried."""
        wait_s = _WAIT_FOR_REPLICA_S if request.method == "POST" else _LOOK_FOR_REPLICA_S
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(wait_s):
                choice = self._replicas.choose_replica(key, avoid=tuple(avoid))
                selection = await stack.enter_async_context(choice)
            name: str = selection.replica_id
            if name in avoid:  # there is no other: what it says counts
                last_try = True
            avoid.append(name)
            ticket = self._books.place(name, key)
            stack.callback(self._books.end, ticket)
            answer = _Answer(send, request, name)
            try:
                url = URL(selection.replica_metadata["address"] + request.target, encoded=True)
                call = self._http().request(
                    request.method, url, headers=request.headers_on(), data=request.data(), allow_redirects=False
                )
                response = await stack.enter_async_context(call)
                if response.status in _ELSEWHERE and not last_try and len(self._books.addresses) > 1:
                    return False
                await answer.send_on(response, lambda: self._books.first_token(ticket))
            except (aiohttp.ClientError, OSError) as error:
                if not answer.started:
                    raise _LostError(str(error) or type(error).__name__) from None
                log.warning("a replica was lost in the middle of an answer: %s", error)
                await answer.end_early()
            return True

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:  # needs the running loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
                read_bufsize=2**18,
            )
        return self._session

    async def _send_metrics(self, send: Send) -> None:
        """Those of all replicas, told apart by a label."""

        async def ask(name: str, address: str) -> tuple[str, str] | None:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
                async with self._http().get(f"{address}/metrics", timeout=timeout) as response:
                    return name, await response.text()
            return None

        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_FOR_REPLICA_S):
                await self._meet_replicas()
        pages = await asyncio.gather(*(ask(name, address) for name, address in self._books.addresses.items()))
        text = metrics_text.join(dict(page for page in pages if page is not None))
        await _send_whole(send, 200, [(b"content-type", CONTENT_TYPE.encode())], text.encode())


class _Answer:
    """The way back. Nothing is sent before the first bytes of the body are there."""

    def __init__(self, send: Send, request: _Request, replica: str) -> None:
        self._send = send
        self._request = request
        self._replica = (REPLICA_HEADER, replica.encode())
        self._is_stream = False
        self.started = False

    async def send_on(self, response: aiohttp.ClientResponse, on_first: Callable[[], None]) -> None:
        headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _NOT_SENT_BACK]
        headers.append(self._replica)
        self._is_stream = response.content_type == "text/event-stream"
        if response.content_length is not None and response.content_length <= _LEAST_WHOLE:
            body = await response.read() if self._request.method != "HEAD" else b""
            on_first()
            self.started = True
            await _send_whole(self._send, response.status, headers, body)
            return
        async for piece in response.content.iter_any():
            if not self.started:
                on_first()
                await self._start(response.status, headers)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        if not self.started:
            await self._start(response.status, headers)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def end_early(self) -> None:
        """A stream ends with an error event; of any other answer the end is missing, and the client is told by that."""
        if not self._is_stream:
            raise ConnectionError("the replica was lost in the middle of an answer")
        error = EngineError("the replica was lost")
        event = shape_of(self._request.path, "").event(error)
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


async def _send_whole(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    known = [(name, value) for name, value in headers if name != b"content-length"]
    length = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*known, *length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_error(send: Send, request: _Request, error: TgiError) -> None:
    response = shape_of(request.path, "").failure(error)
    headers = [(b"content-type", response.content_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in response.headers.items()]
    await _send_whole(send, response.status, headers, response.body)
