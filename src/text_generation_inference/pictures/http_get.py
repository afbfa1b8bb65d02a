"""One GET over one connection: bytes of a stranger's server, read with limits. Never follows, retries or decompresses.

`fetch` decides where to connect and what the answer means. The parser is llhttp's, which is strict: lengths that
contradict each other, and chunks that are none, end the reading.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

from text_generation_inference.pictures.address import MediaAddress
from text_generation_inference.version import __version__

_PIECE = 1 << 18  # bytes read at once
_MAX_HEAD = 1 << 16  # bytes of a status line and headers, interim answers included
_MAX_HEADERS = 200


class BadAnswerError(Exception):
    """What came is no answer to our request. The text is for the caller."""


@dataclass(slots=True)
class AnswerHead:
    """The head of an answer; its body comes by `AnswerReading.read_body`."""

    status: int = 0
    location: bytes | None = None
    length: int | None = None
    codings: list[bytes] = field(default_factory=list[bytes])  # of Content-Encoding
    transfer: list[bytes] = field(default_factory=list[bytes])  # of Transfer-Encoding


class AnswerReading:
    """The answer on one connection, as it comes in."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._answer = AnswerHead()
        self._num_headers = 0
        self._in_body = self._is_complete = False
        self._fault = ""
        self._parts: list[bytes] = []  # of the body, not yet taken

    async def read_head(self) -> AnswerHead:
        num_bytes = 0
        while not self._in_body:
            if num_bytes > _MAX_HEAD:
                raise BadAnswerError("its server sends headers without end")
            num_bytes += await self._read_piece()
        return self._answer

    async def read_body(self, take: Callable[[bytes], None]) -> None:
        """Hand the body over in parts. `take` may raise to end it."""
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                take(part)
            if self._is_complete:
                return
            if await self._read_piece() == 0:  # the end of a connection is the end of a body that has no other
                return

    async def _read_piece(self) -> int:
        piece = await self._reader.read(_PIECE)
        if not piece:
            if self._in_body and self._answer.length is None and not self._answer.transfer:
                return 0
            raise BadAnswerError("the connection ended early")
        try:
            self._parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._is_complete:  # else: what comes after the answer is nothing to us
                raise BadAnswerError("its server does not speak HTTP as it should") from None
        if self._fault:
            raise BadAnswerError(self._fault)
        return len(piece)

    # -- called by the parser --------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:  # what comes after a body
            return
        self._num_headers += 1
        if self._num_headers > _MAX_HEADERS:
            self._fault = "its server sends headers without end"
        match name.lower():
            case b"location":
                self._answer.location = value
            case b"content-length" if value.isdigit():
                self._answer.length = int(value[:20])
            case b"content-encoding":
                self._answer.codings += _items(value)
            case b"transfer-encoding":
                self._answer.transfer += _items(value)
            case _:
                pass

    def on_headers_complete(self) -> None:
        if self._in_body:  # another answer, that nobody asked for
            return
        self._answer.status = self._parser.get_status_code()
        if 100 <= self._answer.status < 200:  # an interim answer: the one that counts follows
            self._answer = AnswerHead()
            return
        if self._answer.transfer not in ([], [b"chunked"]):
            self._fault = "its server sends the body in a form that was not asked for"
        self._in_body = True

    def on_body(self, part: bytes) -> None:
        if not self._is_complete:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_complete = self._in_body


def _items(value: bytes) -> list[bytes]:
    return [item.strip().lower() for item in value.split(b",") if item.strip()]


def write_request(writer: asyncio.StreamWriter, address: MediaAddress) -> None:
    """Names no coding that a body could be inflated from, and sends nothing that belongs to the caller."""
    lines = (
        f"GET {address.target} HTTP/1.1",
        f"Host: {address.host_header}",
        f"User-Agent: text-generation-inference/{__version__}",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii"))
