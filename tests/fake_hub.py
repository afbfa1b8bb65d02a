"""A hub of its own on this machine that answers as the real one does."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(300_000),
    "tokenizer.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# Hello",
    "pytorch_model.bin": b"pickle",
    "original/model.safetensors": b"twice",
}


class Hub(http.server.ThreadingHTTPServer):
    """A model `org/model`, and for other names the failure the real hub answers with."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = dict(FILES)
        self.revisions = {"main": COMMIT, "refs/pr/7": OTHER_COMMIT}
        self.asked: list[str] = []  # "METHOD path"
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()
        self.num_connections = 0
        self.drops: dict[str, list[int]] = {}  # file -> after how many bytes the next answers break off
        self.failures = {
            "org/absent": (404, "RepoNotFound"),
            "org/private": (401, "RepoNotFound"),
            "org/gated": (403, "GatedRepo"),
            "org/broken": (500, ""),
            "org/mirror": (404, ""),
            "org/locked": (401, ""),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def get_request(self) -> Any:
        self.num_connections += 1
        return super().get_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no failure of the test."""


class Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub = self.server
        path = unquote(self.path.partition("?")[0])
        hub.asked.append(f"{self.command} {path}")
        if "/org/" in path:  # the library also asks for lists of its own, without a token
            hub.tokens.add(self.headers.get("Authorization"))
        for name, (status, code) in hub.failures.items():
            if f"/{name}/" in path:
                return self.send(status, b"", {"X-Error-Code": code} if code else {})
        start = "/api/models/org/model/revision/"
        if path.startswith(start):
            commit = hub.revisions.get(path.removeprefix(start))
            if commit is None:
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return self.send_json({"id": "org/model", "sha": commit, "siblings": []})
        for revision, commit in [*hub.revisions.items(), *((commit, commit) for commit in hub.revisions.values())]:
            if path == f"/api/models/org/model/tree/{revision}":
                return self.send_json([self.entry(name, content) for name, content in hub.files.items()])
            prefix = f"/org/model/resolve/{revision}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in hub.files:
                return self.send_file(path.removeprefix(prefix), commit)
        return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(content), "oid": digest(content)}

    def send_file(self, name: str, commit: str) -> None:
        content = self.server.files[name]
        headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": commit}
        wanted = self.headers.get("Range")
        if not wanted:
            return self.send(200, content, headers, name)
        self.server.ranges.append(f"{name} {wanted}")
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.send(206, part, headers, name)

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            drops = self.server.drops.get(name)
            if drops:
                content = content[: drops.pop(0)]
                self.close_connection = True
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()
