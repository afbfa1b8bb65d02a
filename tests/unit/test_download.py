"""Downloading, against a hub of its own on this machine that answers as the real one does."""

import errno
import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tgi.errors import ModelFormatError, ModelNotFoundError, ResourceError, StartError
from tgi.weights import download
from tgi.weights.download import download_model
from tgi.weights.source import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
        self.asked: list[str] = []
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


class Answer(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        for name, (status, code) in hub.failures.items():
            if f"/{name}/" in path:
                return self.send(status, b"", {"X-Error-Code": code} if code else {})
        if path == "/api/models/org/model/revision/main":
            return self.send_json({"id": "org/model", "sha": COMMIT, "siblings": []})
        if path.startswith("/api/models/org/model/revision/"):
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if path == f"/api/models/org/model/tree/{COMMIT}":
            return self.send_json([self.entry(name, content) for name, content in hub.files.items()])
        prefix = f"/org/model/resolve/{COMMIT}/"
        if path.startswith(prefix) and path.removeprefix(prefix) in hub.files:
            content = hub.files[path.removeprefix(prefix)]
            return self.send(200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT})
        return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def entry(self, name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(content), "oid": digest(content)}

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the test run says."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


def fetch(hub: Hub, tmp_path: Path, model: str = "org/model", **options: Any) -> Path:
    return download_model(model, cache_dir=tmp_path / "hub", endpoint=hub.url, **options)


def test_only_what_serving_needs(hub: Hub, tmp_path: Path) -> None:
    folder = fetch(hub, tmp_path)
    assert folder.name == COMMIT
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not any("pytorch_model.bin" in line or "original" in line for line in hub.asked)


def test_progress(hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, int, int]] = []
    fetch(hub, tmp_path, progress=lambda *call: calls.append(call))
    size = sum(
        len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    )
    assert calls[0] == ("downloading", 0, 0) and calls[-1] == ("downloading", size, size)
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)
    assert capfd.readouterr() == ("", "")  # the library's own bars stay silent


def test_second_start_fetches_no_file(hub: Hub, tmp_path: Path) -> None:
    first = fetch(hub, tmp_path)
    hub.asked.clear()
    assert fetch(hub, tmp_path) == first
    assert not any("/resolve/" in line for line in hub.asked)


def test_offline_uses_the_cache(hub: Hub, tmp_path: Path) -> None:
    first = fetch(hub, tmp_path)
    hub.asked.clear()
    assert fetch(hub, tmp_path, offline=True) == first
    assert hub.asked == []


def test_hub_gone_uses_the_cache(hub: Hub, tmp_path: Path) -> None:
    first = fetch(hub, tmp_path)
    assert download_model("org/model", cache_dir=tmp_path / "hub", endpoint="http://127.0.0.1:9") == first


@pytest.mark.parametrize(
    ("model", "options", "kind", "text"),
    [
        ("org/absent", {}, ModelNotFoundError, "Model 'org/absent' is not on the hub, or is private.*HF_TOKEN"),
        ("org/private", {}, ModelNotFoundError, "Model 'org/private' is not on the hub, or is private.*HF_TOKEN"),
        ("org/mirror", {}, ModelNotFoundError, "Model 'org/mirror' is not on the hub"),
        ("org/gated", {}, StartError, "'org/gated' is gated. Ask for access at https://huggingface.co/org/gated.*HF_T"),
        ("org/locked", {}, StartError, r"refuses access to 'org/locked' \(status 401\).*HF_TOKEN"),
        ("org/broken", {}, StartError, "status 500 when asked for 'org/broken'. Try again later"),
        ("org/model", {"revision": "v9"}, ModelNotFoundError, "no 'org/model' at revision 'v9'. Check --revision"),
        ("org/model", {"offline": True}, ModelNotFoundError, "not complete in the local cache, and offline mode is on"),
        ("bad name!", {}, ModelNotFoundError, "'bad name!' is no possible name"),
    ],
)
def test_failures(
    hub: Hub, tmp_path: Path, model: str, options: dict[str, Any], kind: type[StartError], text: str
) -> None:
    with pytest.raises(StartError, match=text) as caught:
        fetch(hub, tmp_path, model, **options)
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"Cannot download 'org/model' from the hub: .*Check the network") as caught:
        download_model("org/model", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")
    assert "\n" not in str(caught.value)


def test_disk_full(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(download, "snapshot_download", full)
    with pytest.raises(ResourceError, match=r"Not enough disk space to download 'org/model'.*HF_HUB_CACHE"):
        fetch(hub, tmp_path)


def test_pickles_only(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(
        ModelFormatError, match=r"no safetensors weights\. Pickled weights .*from_pretrained\('org/model'\)"
    ):
        fetch(hub, tmp_path)


def test_no_config(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.Q4_0.gguf": b"GGUF", "notes.json": b"{}"}
    with pytest.raises(ModelFormatError, match=r"has no config\.json.*GGUF files, download one"):
        fetch(hub, tmp_path)


def test_resolve_hub_id(hub: Hub, tmp_path: Path) -> None:
    found = resolve_model("org/model", tmp_path, hub_cache=tmp_path / "hub", endpoint=hub.url)
    assert (found.model_id, found.sha) == ("org/model", COMMIT)
    assert (found.path / "config.json").is_file() and str(found.path) in found.note


def test_resolve_unknown_names_all_forms(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("org/absent", tmp_path, hub_cache=tmp_path / "hub", endpoint=hub.url)
    for part in ("is not on the hub", "no file or folder of that name", "`embedded`", ".gguf file", "hub, such as"):
        assert part in str(caught.value)
