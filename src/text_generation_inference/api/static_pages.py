"""The pages of the server: files of this package under `pages/`, with the headers that keep a page to itself.

`/pages/FOLDER/FILE` is `pages/FOLDER/FILE`; `PAGES` are the addresses that people type. A page loads nothing from
elsewhere, runs no script but its own files, and may talk to this server alone, or also to servers that its address
names (`?server=https://...`, once for each): the person who opens it decides that, never what a model wrote.
"""

import gzip
import hashlib
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from urllib.parse import parse_qsl

import msgspec

from text_generation_inference.api import info
from text_generation_inference.api.call import Call
from text_generation_inference.api.http import Response

PAGES = {"/chat": "chat/index.html", "/dashboard": "dashboard/index.html"}  # by path
_HTML = "text/html; charset=utf-8"
_TYPES = {
    ".html": _HTML,
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_SERVER = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_MAX_SERVERS = 8
_HEADERS = {
    "cache-control": "no-cache",  # asked each time, answered with 304 while the file is the same
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class StaticFile(msgspec.Struct, frozen=True):
    content: bytes
    compressed: bytes
    content_type: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """Every file under `pages/`, by its path there. Nothing else can be asked for."""
    found: dict[str, StaticFile] = {}
    folders: list[tuple[str, Traversable]] = [("", files("text_generation_inference.api").joinpath("pages"))]
    while folders:
        path, folder = folders.pop()
        for entry in folder.iterdir():
            ending = entry.name[entry.name.rfind(".") :]
            if entry.is_dir():
                folders.append((f"{path}{entry.name}/", entry))
            elif ending in _TYPES:
                content = entry.read_bytes()
                etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                compressed = gzip.compress(content, 9, mtime=0)
                found[path + entry.name] = StaticFile(content, compressed, _TYPES[ending], etag)
    return found


async def page(call: Call) -> None:
    """A page by the address that people type."""
    await _answer(call, PAGES[call.request.path])


async def page_file(call: Call) -> None:
    """A file of a page."""
    await _answer(call, call.request.variables[0])


async def root(call: Call) -> None:
    """The chat page for who asks for HTML, which browsers do; for everybody else what TGI has here: its health."""
    if "text/html" in call.request.headers.get("accept", ""):
        await _answer(call, PAGES["/chat"])
    else:
        await info.health(call)


async def _answer(call: Call, path: str) -> None:
    file = static_files().get(path)
    if file is None:
        await call.connection.respond(Response(404))
        return
    request = call.request.headers
    headers = {**_HEADERS, "etag": file.etag}
    if file.content_type == _HTML:
        headers["content-security-policy"] = content_security_policy(call.request.query)
        headers["vary"] = "accept, accept-encoding"
    known = [tag.strip().removeprefix("W/") for tag in request.get("if-none-match", "").split(",")]
    if file.etag in known or known == ["*"]:
        await call.connection.respond(Response(304, headers=headers))
        return
    content = file.content
    if _takes_gzip(request.get("accept-encoding", "")):
        content = file.compressed
        headers["content-encoding"] = "gzip"
    await call.connection.respond(Response(200, content, file.content_type, headers))


def _takes_gzip(accepted: str) -> bool:
    """Whether a client says that it can read gzip; `gzip;q=0` says that it cannot."""
    for coding in accepted.split(","):
        name, _, quality = coding.partition(";")
        if name.strip().lower() == "gzip":
            return re.fullmatch(r"\s*q=0(\.0*)?\s*", quality) is None
    return False


def content_security_policy(query: str) -> str:
    """What a page may load and reach. `query` is that of its address."""
    named = [value for name, value in parse_qsl(query) if name == "server"]
    servers = [value for value in named if _SERVER.fullmatch(value)][:_MAX_SERVERS]
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data: blob:",  # no host: a picture's address could carry a conversation away
            " ".join(("connect-src 'self'", *servers)),
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
