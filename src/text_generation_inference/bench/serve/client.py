"""Many streamed answers at a time over plain sockets, each token with the moment it came.

One thread, one selector, no event loop of a library: with hundreds of streams their cost per token would be
most of the work. Everything that a wait finds ready gets the time at which the wait returned, because by then it was
there. Knows HTTP and server-sent events; what an event means is the business of `apis`.
"""

import errno
import os
import select
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

import httptools
import msgspec

from text_generation_inference.bench.serve.apis import ReadEvent, StreamedAnswer, describe_body

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_READ_BYTES = 1 << 16
_MOST_EVENT_BYTES = 1 << 24
_MOST_ERROR_BYTES = 1 << 13
_TRY_AGAIN = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

Place = tuple[str | int, ...]  # as `socket.connect` takes it


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens, found once: no request waits for a name to be looked up."""

    family: int
    place: Place
    tls_name: str | None = None  # for https: whom the certificate must name


class Exchange:
    """A request on its way and what came back."""

    __slots__ = ("answer", "connection", "data", "end", "error", "is_retried", "number", "planned", "sent")

    def __init__(self, number: int, data: bytes, planned: float) -> None:
        self.number, self.data, self.planned = number, data, planned
        self.sent = 0.0
        self.end: float | None = None
        self.error: str | None = None
        self.answer = StreamedAnswer()
        self.connection: _Connection | None = None
        self.is_retried = False


class Client:
    """Call `poll` again and again; `on_end` is called from there for every exchange that succeeded or failed."""

    def __init__(
        self, address: Address, read_event: ReadEvent, timeout_s: float, on_end: Callable[[Exchange], None]
    ) -> None:
        self.address, self.read_event, self._timeout_s, self._on_end = address, read_event, timeout_s, on_end
        self.selector = selectors.DefaultSelector()
        self.now = time.monotonic()  # when the last wait returned
        self.idle: list[_Connection] = []
        self.in_flight: set[Exchange] = set()
        self._deadlines: deque[tuple[float, Exchange]] = deque()
        self.tls = None if address.tls_name is None else ssl.create_default_context()

    def send(self, exchange: Exchange) -> None:
        """The clock of the request starts here: a connection that has to be opened first is part of its time."""
        self.in_flight.add(exchange)
        exchange.sent = time.monotonic()
        self._deadlines.append((exchange.sent + self._timeout_s, exchange))
        self._dispatch(exchange)

    def _dispatch(self, exchange: Exchange) -> None:
        if self.idle:
            self.idle.pop().begin(exchange)
        else:
            try:
                _Connection(self, exchange)
            except OSError as error:
                self.end(exchange, describe_os_error(error))

    def poll(self, seconds: float) -> None:
        """Wait at most so long for something to be ready, and handle everything that is."""
        events = self.selector.select(0)
        if not events and seconds > 0:
            # Waiting for the selector itself: epoll would round the time up to milliseconds.
            select.select([self.selector.fileno()], [], [], seconds)  # pyright: ignore[reportAttributeAccessIssue]
            events = self.selector.select(0)
        self.now = time.monotonic()
        for key, mask in events:
            key.data(mask)
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= self.now or deadlines[0][1].end is not None):
            exchange = deadlines.popleft()[1]
            if exchange.end is None and exchange.connection is not None:
                exchange.connection.fail(f"no end within {self._timeout_s:g} s")

    def end(self, exchange: Exchange, error: str | None) -> None:
        exchange.end, exchange.error, exchange.connection = max(self.now, exchange.sent), error, None
        exchange.data = b""
        self.in_flight.discard(exchange)
        self._on_end(exchange)

    def retry(self, exchange: Exchange) -> None:
        exchange.is_retried = True
        self.idle, idle = [], self.idle
        try:
            self._dispatch(exchange)
        finally:
            self.idle = idle

    def cut(self) -> list[Exchange]:
        """Give up what is in flight: exchanges without an end."""
        left = list(self.in_flight)
        self.in_flight.clear()
        self._deadlines.clear()
        for exchange in left:
            if exchange.connection is not None:
                exchange.connection.close()
                exchange.connection = None
        return left

    def close(self) -> None:
        self.cut()
        for connection in list(self.idle):
            connection.close()
        self.selector.close()


class _Connection:
    """Kept open between answers. The methods `on_...` are called by the parser."""

    def __init__(self, client: Client, exchange: Exchange) -> None:
        self._client = client
        self._exchange: Exchange | None = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._unsent = memoryview(b"")
        self._rest = b""  # of an event, or of the body of an error
        self._status = 0
        self._is_used = False  # it has carried an answer before
        self._has_bytes = False  # of the present answer
        self._is_closed = False
        address = client.address
        exchange.connection = self
        self.sock: socket.socket = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            problem = self.sock.connect_ex(address.place)
            if problem not in (0, errno.EINPROGRESS):
                raise OSError(problem, os.strerror(problem))
            client.selector.register(self.sock, WRITE, self._connected)
        except OSError:
            self.sock.close()
            raise

    def begin(self, exchange: Exchange) -> None:
        """Another request on a connection that is open."""
        self._exchange, exchange.connection = exchange, self
        self._is_used, self._has_bytes = True, False
        self._start_sending()

    # -- opening and sending ---------------------------------------------------------------------------------------

    def _connected(self, mask: int) -> None:
        problem = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self.fail(describe_os_error(OSError(problem, os.strerror(problem))))
            return
        client = self._client
        if client.tls is not None:
            client.selector.unregister(self.sock)
            self.sock = client.tls.wrap_socket(
                self.sock, server_hostname=client.address.tls_name, do_handshake_on_connect=False
            )
            client.selector.register(self.sock, WRITE, self._shake_hands)
            self._shake_hands(mask)
            return
        client.selector.modify(self.sock, READ, self._readable)
        self._start_sending()

    def _shake_hands(self, mask: int) -> None:
        assert isinstance(self.sock, ssl.SSLSocket)
        selector = self._client.selector
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            selector.modify(self.sock, READ, self._shake_hands)
        except ssl.SSLWantWriteError:
            selector.modify(self.sock, WRITE, self._shake_hands)
        except OSError as error:
            self.fail(describe_os_error(error))
        else:
            selector.modify(self.sock, READ, self._readable)
            self._start_sending()

    def _start_sending(self) -> None:
        assert self._exchange is not None
        self._unsent = memoryview(self._exchange.data)
        self._send()
        if self._unsent and not self._is_closed:
            self._client.selector.modify(self.sock, READ | WRITE, self._send_and_read)

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except _TRY_AGAIN:
            return
        except OSError as error:
            self._lost(describe_os_error(error))

    def _send_and_read(self, mask: int) -> None:
        if mask & WRITE:
            self._send()
        if not self._unsent and not self._is_closed:
            self._client.selector.modify(self.sock, READ, self._readable)
        if mask & READ and not self._is_closed:
            self._readable(mask)  # an early answer, such as a refusal

    # -- receiving -------------------------------------------------------------------------------------------------

    def _readable(self, mask: int) -> None:
        sock = self.sock
        while True:
            try:
                data = sock.recv(_READ_BYTES)
            except _TRY_AGAIN:
                return
            except OSError as error:
                self._lost(describe_os_error(error))
                return
            if not data:
                self._lost("connection closed")
                return
            self._has_bytes = True
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                self.fail(f"the answer is not HTTP: {error}")
                return
            # What TLS has decoded already would not make the socket ready again.
            if self._client.tls is None or self._is_closed or not isinstance(sock, ssl.SSLSocket) or not sock.pending():
                return

    def _lost(self, reason: str) -> None:
        """The server closed the connection."""
        exchange = self._exchange
        if exchange is None:
            self.close()
        elif self._is_used and not self._has_bytes and not exchange.is_retried:
            self.close()  # it was closed while idle: nobody has seen the request
            self._exchange = None
            self._client.retry(exchange)
        elif self._status == 200 and exchange.answer.is_finished:
            self.close()
            self._exchange = None
            self._client.end(exchange, exchange.answer.error)
        else:
            self.fail(f"{reason} in the middle of the answer" if self._has_bytes else f"{reason} without an answer")

    def fail(self, error: str) -> None:
        self.close()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._client.end(exchange, error)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self in self._client.idle:
            self._client.idle.remove(self)
        self._client.selector.unregister(self.sock)
        self.sock.close()

    # -- called by the parser --------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._status, self._rest = self._parser.get_status_code(), b""

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if self._status != 200:
            self._rest += body[: _MOST_ERROR_BYTES - len(self._rest)]
            return
        if self._rest:
            body = self._rest + body
        if b"\r" in body:  # some servers end lines the other way
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = body.split(b"\n\n")
        read_event, answer, now = self._client.read_event, exchange.answer, self._client.now
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                read_event(event[5:], answer, now)
            else:
                payload = _payload_of(event)
                if payload:
                    read_event(payload, answer, now)
        if len(self._rest) > _MOST_EVENT_BYTES:
            answer.error, self._rest = "an event has no end", b""

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or 100 <= self._status < 200:
            return
        self._exchange = None
        answer, error = exchange.answer, None
        if self._status != 200:
            told = describe_body(self._rest)
            error = f"HTTP {self._status}: {told}" if told else f"HTTP {self._status}"
        elif answer.error is not None:
            error = answer.error
        elif not answer.is_finished:
            error = "the stream ended before the answer did" if answer.times else "the answer is no stream of events"
        self._rest = b""
        if self._parser.should_keep_alive() and not self._unsent:
            self._client.idle.append(self)
        else:
            self.close()
        self._client.end(exchange, error)


def _payload_of(event: bytes) -> bytes:
    """The data of an event of several lines, of which some may be comments or other fields."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def describe_os_error(error: OSError) -> str:
    """The same text for the same problem, so that errors can be counted."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    known = {
        errno.ECONNREFUSED: "connection refused",
        errno.ECONNRESET: "connection reset",
        errno.EPIPE: "connection reset",
        errno.EMFILE: "this machine allows no more open connections (see ulimit -n)",
    }
    return known.get(error.errno or 0) or error.strerror or str(error)
