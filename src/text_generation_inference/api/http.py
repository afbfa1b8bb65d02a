"""HTTP as the routes see it: a request with a bounded body, plain responses, and streams of events.

Sits directly on ASGI. Knows nothing of models or routes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from text_generation_inference.api.connections import BodyBudget
from text_generation_inference.failpoints import failpoint

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_TIMEOUT_S, BODY_TOTAL_TIMEOUT_S = 30.0, 120.0  # between two pieces of a body, and for all of it
CLOSE = {"connection": "close"}
_RETRY = {"retry-after": "1", **CLOSE}
_LONG_BODY = 4_000  # bytes
_USUAL_BODY = 2_000_000  # bytes; what is larger holds more than text
_MAX_DISCARDED = 64_000_000  # bytes beyond the limit that are read before the connection is closed
KEEP_ALIVE_S = 15.0  # a stream that has been silent this long gets a comment

_encode_json = msgspec.json.Encoder().encode


class HttpError(Exception):
    """An answer made before a route runs: plain text, as the framework under TGI gives it."""

    def __init__(
        self, status: int, text: str, headers: Mapping[str, str] | None = None, field: str | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, dict(headers or {})
        self.field = field  # what is wrong, if it is a part of the body


class ClientGoneError(Exception):
    """The connection was closed before the request was complete."""


class HttpRequest:
    """One HTTP request."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, payload_limit: int, budget: BodyBudget) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.arrived = time.perf_counter()
        self.id = ""
        self.variables: tuple[str, ...] = ()  # parts of the path that a route leaves open
        self._receive = receive
        self._limit = payload_limit
        self._budget = budget
        self._complete = False
        self._num_held = 0  # bytes of the body that count until it is freed
        self.num_body_bytes = 0
        self.gone = False  # the client left before it had its answer
        self._watched: tuple[asyncio.Task[None], Callable[[], bool]] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def is_long(self) -> bool:
        """Whether working on the body may take so long that others would notice."""
        return self.num_body_bytes > _LONG_BODY

    async def read_json(self, of_any_type: bool = False) -> bytes:
        """The body of a request that must be JSON by its content type.

        `of_any_type`: unless it comes from a page, which says its origin. What is not said to be JSON a page may send
        without being asked whether it may.
        """
        kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
        is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
        if not is_json and not (of_any_type and "origin" not in self.headers):
            raise HttpError(415, "Expected request with `Content-Type: application/json`", field="content-type")
        return await self.read_body()

    async def read_body(self) -> bytes:
        """All of it. What comes beyond the limit is read and thrown away, so that the client gets to see the answer."""
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise HttpError(415, f"Content-Encoding `{coding[:32]}` is not supported: send the body as it is", CLOSE)
        length = self.headers.get("content-length", "")
        too_large = length.isdecimal() and int(length) > self._limit
        if too_large and "expect" in self.headers:
            raise _too_large()  # the client asked before it sends
        body = await self._read_pieces(too_large)
        self.num_body_bytes = len(body)
        if self._watched is not None:
            self._watcher = asyncio.create_task(self._watch())
        return body

    async def _read_pieces(self, too_large: bool) -> bytes:
        pieces: list[bytes] = []
        size = num_kept = 0
        deadline = time.monotonic() + BODY_TOTAL_TIMEOUT_S
        try:
            while not self._complete:
                message = await self._next_message(min(BODY_TIMEOUT_S, deadline - time.monotonic()))
                piece = message.get("body", b"")
                size += len(piece)
                too_large = too_large or size > self._limit
                if size > self._limit + _MAX_DISCARDED:
                    raise _too_large()
                if too_large:
                    self._budget.give_back(num_kept)
                    pieces, num_kept = [], 0
                elif self._budget.take(len(piece), size):
                    num_kept += len(piece)
                    pieces.append(piece)
                else:
                    raise HttpError(503, "Failed to buffer the request body: the server is overloaded", _RETRY)
                self._complete = not message.get("more_body", False)
            self._num_held = max(0, num_kept - _USUAL_BODY)
        finally:
            self._budget.give_back(num_kept - self._num_held)
        if too_large:
            raise _too_large()
        return b"".join(pieces)

    def free_body(self) -> None:
        """What was in the body is no longer kept. Large ones, which hold pictures, count until then."""
        self._budget.give_back(self._num_held)
        self._num_held = 0

    async def _next_message(self, timeout_s: float) -> Message:
        try:
            message = await asyncio.wait_for(self._receive(), timeout_s)
        except TimeoutError:
            text = "Failed to buffer the request body: it did not come in time"
            raise HttpError(408, text, CLOSE) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message

    # -- the other end ---------------------------------------------------------------------------------------------

    def watch(self, task: "asyncio.Task[None]", is_over: Callable[[], bool]) -> None:
        """Cancel `task` if the client leaves once its body is read, unless the answer `is_over`."""
        self._watched = (task, is_over)

    def stop_watching(self) -> None:
        self._watched = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # it ends with an error whose traceback holds this request: no cycle of the two

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._watched is not None:
            task, is_over = self._watched
            if not is_over():
                self.gone = True
                task.cancel()


def _too_large() -> HttpError:
    text = "Failed to buffer the request body: length limit exceeded"
    return HttpError(413, text, CLOSE)


class Response:
    """A whole answer."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self, status: int, body: bytes = b"", content_type: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.status, self.body, self.content_type = status, body, content_type
        self.headers = headers or {}


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, _encode_json(value), "application/json", headers)


def text_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, text.encode(), "text/plain; charset=utf-8", headers)


def frame(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode_json(value) + b"\n\n"


def named_frame(name: str, value: object) -> bytes:
    """One server-sent event with a name, which some clients choose by."""
    return b"event: " + name.encode() + b"\ndata: " + _encode_json(value) + b"\n\n"


def encode_line(value: object) -> bytes:
    """One line of a stream of JSON."""
    return _encode_json(value) + b"\n"


KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"


class Connection:
    """The way back to the client: one `Response`, or a stream of events. Headers common to all answers go in here."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.started = self.complete = False
        self.last_write = time.monotonic()
        self.status = 0

    async def respond(self, response: Response) -> None:
        self.started = self.complete = True
        self.status = response.status
        headers: list[tuple[bytes, bytes]] = []
        if response.status != 304:  # whose length would be that of what is not sent
            headers.append((b"content-length", str(len(response.body)).encode()))
        if response.content_type:
            headers.append((b"content-type", response.content_type.encode()))
        headers += [(name.encode(), value.encode("latin-1")) for name, value in response.headers.items()]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers + self._headers})
        await self._send({"type": "http.response.body", "body": response.body})

    async def start_events(self, headers: Mapping[str, str], content_type: str = "text/event-stream") -> None:
        self.started, self.status = True, 200
        all_headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")]
        all_headers += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": all_headers + self._headers})

    async def start_json(self) -> None:
        """A whole answer that is sent in pieces."""
        self.started, self.status = True, 200
        headers = [(b"content-type", b"application/json"), *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        """One or more events. Waits while the client does not read."""
        failpoint("api.write")
        self.last_write = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes = b"") -> None:
        self.complete = True
        await self._send({"type": "http.response.body", "body": data})
