"""Limits on what a connection may send before a request is complete: uvicorn has none of its own.

Level 8. A head (request line and headers) that is too long or takes too long ends its connection with a clear status.
"""

from asyncio import TimerHandle, Transport
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_URL_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 60.0  # a client that reads nothing for so long, with full buffers, is gone
LINGER_S = 2.0  # what still comes after a refusal is thrown away so long; else the client sees a reset, not the answer


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # received of the present head
        self._in_head = True
        self._refused = False
        self._head_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head and not self._head_bytes:
            data = data.lstrip(b"\r\n")  # some clients send an empty line behind a body
            if not data:
                return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start_timer()
        if self.parser is not None and not self.transport.is_closing():
            super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's headers are too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, "the request's URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS or len(name) + len(value) > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request has too many or too long headers")

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        if not self._refused and not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None and not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self.cycle is not None and not self._refused:
            super().on_message_complete()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._out_of_time)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _answering(self) -> bool:
        """Whether an earlier request on this connection still gets its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _out_of_time(self) -> None:
        self._head_timer = None
        if self._answering:
            self._start_timer()
        elif self._head_bytes:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request's headers did not come in time")
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer and close. Requests already running on this connection end with it."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        if self._answering:  # nothing can be said in the middle of an answer
            self.transport.abort()
            return
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self.transport.write(f"{head}content-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode())
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
