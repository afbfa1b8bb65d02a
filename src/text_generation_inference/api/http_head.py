"""Which heads of requests are refused although the parser takes them: what two readers could understand in two ways.

A proxy in front and this server must agree on where a request ends and whose it is; what leaves that open is
refused, never guessed.
"""

import re
from http import HTTPStatus
from typing import NamedTuple

Headers = list[tuple[bytes, bytes]]

VERSIONS = ("1.1", "1.0")
_ONCE = (b"host", b"authorization", b"content-length", b"transfer-encoding", b"content-type", b"expect")
_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]*")
_MAX_LENGTH_DIGITS = 19  # of a Content-Length: what fits 64 bits


class Refusal(NamedTuple):
    status: HTTPStatus
    text: str


def _bad(text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, text)


def check_head(version: str, target: bytes, headers: Headers) -> Refusal | None:
    """Names of `headers` are in lower case."""
    if version not in VERSIONS:
        return wrong_version()
    once: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE:
            if name in once:
                return _bad(f"the request has more than one {name.decode().title()} header")
            once[name] = value
    host = once.get(b"host")
    if host is None and version == "1.1":
        return _bad("the request has no Host header")
    if host is not None and not _HOST.fullmatch(host):
        return _bad("the request's Host header is not a host")
    if len(once.get(b"content-length", b"").strip()) > _MAX_LENGTH_DIGITS:
        return _bad("the request's Content-Length is out of range")
    coding = once.get(b"transfer-encoding")
    if coding is not None:
        if version == "1.0":
            return _bad("HTTP/1.0 has no Transfer-Encoding")
        if coding.strip().lower() != b"chunked":
            return Refusal(HTTPStatus.NOT_IMPLEMENTED, "the only Transfer-Encoding served is chunked")
    if once.get(b"expect", b"100-continue").strip().lower() != b"100-continue":
        return Refusal(HTTPStatus.EXPECTATION_FAILED, "the only expectation served is 100-continue")
    if not target.startswith((b"/", b"http://", b"https://")):
        return _bad("the request's target is not a path")
    return None


def wrong_version() -> Refusal:
    return Refusal(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 and HTTP/1.0 are served here")
