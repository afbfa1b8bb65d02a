"""One connection: uvicorn's HTTP protocol made strict, with limits on what a client may send, hold and leave unread.

What could be read in two ways is refused (`http_head`), with a clear status and behind the answers that the
connection still owes. A request that is complete is answered although the client has closed its sending side. What all
connections take together is `connections`' business.
"""

import logging
from asyncio import TimerHandle, Transport
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from text_generation_inference.api.connections import Connections, is_reset, num_unacknowledged
from text_generation_inference.api.http_head import check_head, wrong_version

log = logging.getLogger("text_generation_inference.api")

MAX_URL_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_PIPELINED = 16  # requests that wait behind one that is being answered
MAX_FRAMING_BYTES = 64 * 1024  # of chunk sizes, extensions and trailers, beside as much as the body itself
SLICE = 64 * 1024  # bytes looked at before limits are checked again
HEAD_TIMEOUT_S = 20.0
SPARE_HEAD_TIMEOUT_S = 5.0
DISCARD_TIMEOUT_S = 30.0  # for the rest of a body whose request is answered already
LINGER_S = 2.0  # what still comes after a refusal is thrown away so long; else the client sees a reset, not the answer
NO_PROGRESS_S = 60.0  # a client that takes nothing of what waits for it so long is gone
SLOW_S, SLOW_BYTES = 600.0, 65_536  # and so is one that takes less than this in that time
HALF_CLOSED_POLL_S = 0.25

_FULL = "the server has too many connections"
_VERSION_ERRORS = ("Invalid HTTP version", "Pause on PRI/Upgrade")


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, shared: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared
        self._spare = False  # beyond the limit of connections: for requests without a body
        self._in_message = False  # a request has begun and is not complete
        self._in_head = False
        self._in_body = False
        self._num_received = 0  # bytes of the present head, or behind it
        self._num_body_bytes = 0
        self._replaying = False
        self._eof = False  # the client sends nothing more
        self._discarding = False  # nothing that still comes is looked at
        self._refusal = b""  # goes out once earlier requests have their answers
        self._timer: TimerHandle | None = None  # for a head to come, or for the rest of a body nobody waits for
        self._num_owed = 0  # requests without a complete answer
        self.num_written = 0
        self._progress: _WriteProgress | None = None  # while something is unsent

    # -- the connection --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._spare = not self._shared.enter(self)
        self._start_timer(SPARE_HEAD_TIMEOUT_S if self._spare else HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.leave(self)
        self._stop_timer()
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close, for others need the room. Nothing is asked; one that could not ask yet is told."""
        if self._spare and not self._discarding:
            self.transport.write(_answer(HTTPStatus.SERVICE_UNAVAILABLE, _FULL, retry=True))
        self._discarding = True
        self.transport.close()

    def drain(self) -> None:
        if self._answering:
            self.cycle.keep_alive = False

    def eof_received(self) -> bool | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether the connection stays open for answers."""
        self._eof = True
        if self.transport.is_closing():
            return None
        if self._in_body:
            self._refuse(HTTPStatus.BAD_REQUEST, "the request's body ended early")
        if not self._answering:
            return None
        if not self._refusal:
            self.cycle.keep_alive = False
        self.loop.call_later(HALF_CLOSED_POLL_S, self._look_for_client, True)
        return True

    def _look_for_client(self, first: bool) -> None:
        """The client has closed its sending side, or all of it. Something sent will tell: one that is gone answers with
        a reset. Streams send anyway; an answer that is still to come is preceded by what every client skips."""
        if self.transport.is_closing():
            return
        if is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        if first and self._num_owed == 1 and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(HALF_CLOSED_POLL_S, self._look_for_client, False)

    def check_progress(self, now: float) -> None:
        """End the connection if its client does not read."""
        num_unsent = self.transport.get_write_buffer_size()
        if not num_unsent:
            self._progress = None
            return
        taken = self.num_written - num_unsent - num_unacknowledged(self.transport.get_extra_info("socket"))
        if self._progress is None:
            self._progress = _WriteProgress(taken, now)
        elif not self._progress.goes_on(taken, now):
            self._shared.refusals.add("not_reading", "A client that does not read its answer is disconnected")
            self.transport.abort()

    # -- what comes ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        closed = self.parser is None  # pyright: ignore[reportUnnecessaryComparison]  # uvicorn sets it to None
        if closed or self._discarding or self.transport.is_closing():
            return
        if not self._in_message:
            data = data.lstrip(b"\r\n")  # some clients send an empty line behind a body
            if not data:
                return
        self._shared.set_idle(self, False)
        self._unset_keepalive_if_required()
        for start in range(0, len(data), SLICE):
            piece = data[start : start + SLICE]
            self._num_received += len(piece)
            self._feed(piece)
            self._check_size()
            if self._discarding or self.transport.is_closing():
                return

    def _check_size(self) -> None:
        if self._in_head and self._num_received > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's headers are too long")
        elif self._in_body and self._num_received > MAX_FRAMING_BYTES + 2 * self._num_body_bytes:
            self._refuse(HTTPStatus.BAD_REQUEST, "the request's chunks or trailers are too long for its body")

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            log.error("A request could not be read", exc_info=error)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the log of the server has the details")
        except httptools.HttpParserError as error:
            if str(error) in _VERSION_ERRORS:
                self._refuse(*wrong_version())
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, f"the request is not valid HTTP: {error}")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """A server may ignore a wish for another protocol, but the parser then takes what follows for that protocol's.
        Another parser takes over behind a head that says only how long the body is."""
        lengths = [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        head = b"".join(b"%s: %s\r\n" % line for line in lengths)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._replaying = True
        self._feed(b"POST / HTTP/1.1\r\n%s\r\n" % head)
        self._replaying = False
        if rest and not self._discarding:
            self._feed(rest)

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        super().on_message_begin()
        self._in_message = self._in_head = True
        if self._timer is None:
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        if self._replaying:
            return
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, "the request's URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying or not self._in_head:
            return  # a trailer is no header
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS or len(name) + len(value) > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request has too many or too long headers")

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._in_head, self._in_body = False, True
        self._num_received = self._num_body_bytes = 0
        self._stop_timer()
        if self._discarding or self.transport.is_closing():
            return
        refusal = check_head(self.parser.get_http_version(), self.url, self.headers)
        if refusal is not None:
            self._in_body = False
            self._refuse(*refusal)
        elif self._spare and not self._shared.may_ask(self, self.parser.get_method() not in (b"GET", b"HEAD")):
            self._in_body = False
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, _FULL, retry=True)
        elif len(self.pipeline) >= MAX_PIPELINED:  # the client sends the rest again on another connection
            self._in_body, self._discarding = False, True
            self.cycle.keep_alive = False
        else:
            self._start_cycle()

    def _start_cycle(self) -> None:
        if b"/" not in self.url.partition(b"://")[2]:  # an absolute target may leave the path out
            self.url += b"/" if b"://" in self.url else b""
        try:
            super().on_headers_complete()
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeError):
            self._in_body = False
            self._refuse(HTTPStatus.BAD_REQUEST, "the request's target is not a URL")
            return
        self._num_owed += 1
        self.cycle.transport = _AnswerTransport(self, self.cycle)  # pyright: ignore[reportAttributeAccessIssue]
        if self._spare or self._shared.draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._in_body and not self._discarding:
            self._num_body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it has not even begun: see `_ignore_upgrade`
        was_in_body, self._in_body = self._in_body, False
        self._in_message = self._in_head = False
        self._num_received = 0
        if was_in_body and not self._discarding:
            super().on_message_complete()
            if not self._answering:  # the answer did not wait for the end of the body
                self._stop_timer()
                self.on_idle()

    # -- what goes -------------------------------------------------------------------------------------------------

    @property
    def _answering(self) -> bool:
        return self._num_owed > 0

    def on_response_complete(self) -> None:
        self._num_owed -= 1
        super().on_response_complete()
        if self._answering or self.transport.is_closing():
            return
        if self._refusal:
            self._send_refusal()
        elif self._in_body:
            self._start_timer(DISCARD_TIMEOUT_S, self.transport.close)
        elif not self._in_message:
            self.on_idle()

    def on_idle(self) -> None:
        """Nothing is asked, nothing is owed."""
        self._shared.set_idle(self, True)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def close_behind_answer(self, cycle: Any) -> None:
        """The answer was the last. A body that is still coming is thrown away for a while."""
        if cycle is self.cycle and self._in_body and not self._eof:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._discarding = True
        self._shared.set_leaving(self)
        self._stop_timer()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    # -- refusals --------------------------------------------------------------------------------------------------

    def _refuse(self, status: HTTPStatus, text: str, retry: bool = False) -> None:
        """Answer and close, behind the answers to earlier requests; the request that is arriving gets no other."""
        if self._discarding or self.transport.is_closing():
            return
        self._discarding = True
        self._stop_timer()
        self._refusal = _answer(status, text, retry)
        if status != HTTPStatus.SERVICE_UNAVAILABLE:
            self._shared.refusals.add("malformed", text)
        arriving = self.cycle if self._in_body and self._answering else None
        if arriving is not None:
            if arriving.response_started:  # nothing can be said in the middle of an answer
                self.transport.abort()
                return
            self._num_owed -= 1
            if self.pipeline:
                self.pipeline.popleft()
            else:
                arriving.disconnected = True
                arriving.message_event.set()
        if not self._answering:
            self._send_refusal()

    def _send_refusal(self) -> None:
        self.transport.write(self._refusal)
        if self._eof:
            self.transport.close()
        else:
            self._linger()

    # -- time ------------------------------------------------------------------------------------------------------

    def _start_timer(self, seconds: float, action: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._answering:
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)
        elif self._in_message:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request's headers did not come in time")
        else:
            self.transport.close()


def _answer(status: HTTPStatus, text: str, retry: bool = False) -> bytes:
    """A whole answer behind which the connection is closed."""
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: text/plain; charset=utf-8",
        f"content-length: {len(text)}",
        *(["retry-after: 1"] if retry else []),
        "connection: close",
        "",
        text,
    ]
    return "\r\n".join(lines).encode()


class _AnswerTransport:
    """The transport as one answer sees it: to close it is to close behind this answer."""

    __slots__ = ("_cycle", "_protocol", "is_closing")

    def __init__(self, protocol: LimitedProtocol, cycle: Any) -> None:
        self._protocol, self._cycle = protocol, cycle
        self.is_closing = protocol.transport.is_closing

    def write(self, data: bytes) -> None:
        self._protocol.num_written += len(data)
        self._protocol.transport.write(data)

    def close(self) -> None:
        self._protocol.close_behind_answer(self._cycle)


class _WriteProgress:
    """Whether a client takes what was written for it."""

    __slots__ = ("_moved", "_since", "_taken", "_taken_before")

    def __init__(self, taken: int, now: float) -> None:
        self._taken = self._taken_before = taken
        self._moved = self._since = now

    def goes_on(self, taken: int, now: float) -> bool:
        if taken > self._taken:
            self._taken, self._moved = taken, now
        if now - self._since >= SLOW_S:
            if taken - self._taken_before < SLOW_BYTES:
                return False
            self._taken_before, self._since = taken, now
        return now - self._moved < NO_PROGRESS_S
