"""Downloading, against a hub of its own on this machine that answers as the real one does."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fake_hub import COMMIT, FILES, OTHER_COMMIT, Hub, running_hub
from text_generation_inference.errors import ModelFormatError, ModelNotFoundError, ResourceError, StartError
from text_generation_inference.weights import download
from text_generation_inference.weights.download import download_model, list_files
from text_generation_inference.weights.hub_access import HubAccess
from text_generation_inference.weights.source import resolve_model

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the test run says."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


def fetch(hub: Hub, tmp_path: Path, model: str = "org/model", **options: Any) -> Path:
    offline = options.pop("offline", False)
    access = HubAccess(offline=offline, cache_dir=tmp_path / "hub", endpoint=hub.url, token=options.pop("token", None))
    return download_model(model, options.pop("revision", None), access, **options)


def test_only_what_serving_needs(hub: Hub, tmp_path: Path) -> None:
    folder = fetch(hub, tmp_path)
    assert folder.name == COMMIT
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not any("pytorch_model.bin" in line or "original" in line for line in hub.asked)


def test_code_is_fetched_for_those_who_trust_it(hub: Hub, tmp_path: Path) -> None:
    hub.files = {**FILES, "modeling_x.py": b"raise SystemExit", "deep/y.py": b""}
    assert not list(fetch(hub, tmp_path).rglob("*.py"))
    access = HubAccess(cache_dir=tmp_path / "hub", endpoint=hub.url, code=True)
    for folder in (download.download_description("org/model", None, access), download_model("org/model", None, access)):
        assert (folder / "modeling_x.py").read_bytes() == b"raise SystemExit"
    assert {file.name for file in list_files("org/model", None, access)} >= {"modeling_x.py", "config.json"}


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
    assert download_model("org/model", None, HubAccess(cache_dir=tmp_path / "hub", endpoint=NOWHERE)) == first


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
        download_model("org/model", None, HubAccess(cache_dir=tmp_path, endpoint=NOWHERE))
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
        ModelFormatError,
        match=r"no safetensors weights\. Pickled weights .*serve the folder model: hf download org/model --local-dir model && py",
    ):
        fetch(hub, tmp_path)


def test_no_config(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.Q4_0.gguf": b"GGUF", "notes.json": b"{}"}
    with pytest.raises(ModelFormatError, match=r"has no config\.json.*GGUF files of the hub"):
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


def test_revision_of_a_pull_request(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path, revision="refs/pr/7").name == OTHER_COMMIT
    assert fetch(hub, tmp_path).name == COMMIT
    assert fetch(hub, tmp_path, revision="refs/pr/7", offline=True).name == OTHER_COMMIT
    assert fetch(hub, tmp_path, revision=COMMIT, offline=True).name == COMMIT


def test_token_is_sent(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, token="hf_secret")
    assert hub.tokens == {"Bearer hf_secret"}


def test_dropped_connection_is_taken_up_where_it_broke_off(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    hub.files["model.safetensors"] = bytes(range(256)) * 1000
    hub.drops["model.safetensors"] = [120_000]
    folder = fetch(hub, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert hub.ranges == ["model.safetensors bytes=100000-"]


def test_interrupted_download_keeps_finished_files(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits between its tries
    hub.drops["model.safetensors"] = [1000] * 20
    with pytest.raises(StartError, match="Cannot download 'org/model'"):
        fetch(hub, tmp_path)
    with pytest.raises(ModelNotFoundError, match="not complete in the local cache"):
        fetch(hub, tmp_path, offline=True)
    # Those that are complete are not asked for again.
    finished = {path.name for path in (tmp_path / "hub").rglob("snapshots/*/*")}
    hub.drops.clear()
    hub.asked.clear()
    folder = fetch(hub, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    asked = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "/resolve/" in line}
    assert "model.safetensors" in asked and not asked & finished


def test_weights_from_another_folder(hub: Hub, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    options: dict[str, Any] = {"hub_cache": tmp_path / "hub", "endpoint": hub.url, "weights_override": str(weights)}
    with pytest.raises(ModelNotFoundError, match=r"`weights_cache_override` .* is no folder with \.safetensors files"):
        resolve_model("org/model", tmp_path, **options)
    weights.mkdir()
    (weights / "a.safetensors").write_bytes(b"x")
    found = resolve_model("org/model", tmp_path, **options)
    assert found.weights_path == weights and (found.path / "config.json").is_file()
    assert not any("model.safetensors" in line for line in hub.asked)


def test_what_would_be_downloaded(hub: Hub, tmp_path: Path) -> None:
    access = HubAccess(cache_dir=tmp_path / "hub", endpoint=hub.url)
    files = {file.name: file for file in list_files("org/model", None, access)}
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert files["model.safetensors"].num_bytes == 300_000
    assert not any(file.is_cached for file in files.values())
    fetch(hub, tmp_path)
    assert all(file.is_cached for file in list_files("org/model", None, access))
    with pytest.raises(ModelNotFoundError, match="not on the hub"):
        list_files("org/absent", None, access)


# -- as a user has it: processes of their own ----------------------------------------------------------------------


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def download_weights(hub: Hub, home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **environment}
    return run("text_generation_inference.launch.server_command", "download-weights", *arguments, **variables)


def test_download_command(hub: Hub, tmp_path: Path) -> None:
    first = download_weights(hub, tmp_path, "org/model", HF_API_TOKEN="hf_api", HF_TOKEN="hf_other")
    assert (first.returncode, first.stdout) == (0, "")
    assert "Download: 0.3 MB of org/model" in first.stderr and "Files are in " in first.stderr
    assert hub.tokens == {"Bearer hf_api"}
    assert (tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT / "model.safetensors").is_file()
    second = download_weights(hub, tmp_path, "org/model", "--json-output")
    assert second.returncode == 0
    assert json.loads(second.stderr) == {
        "level": "INFO",
        "message": "Files are already present on the host. Skipping download.",
    }


def test_offline_makes_no_connection(hub: Hub, tmp_path: Path) -> None:
    absent = download_weights(hub, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert absent.returncode == 1 and "offline mode is on" in absent.stderr and absent.stderr.count("\n") == 1
    assert hub.num_connections == 0
    assert download_weights(hub, tmp_path, "org/model").returncode == 0
    num_connections = hub.num_connections
    assert num_connections > 0  # the listener does see those who ask
    for spelling in ("1", "true", "yes"):
        present = download_weights(hub, tmp_path, "org/model", HF_HUB_OFFLINE=spelling)
        assert (present.returncode, "already present" in present.stderr) == (0, True)
    assert run(
        "text_generation_inference.launch.check",
        "org/model",
        HF_ENDPOINT=hub.url,
        HF_HOME=str(tmp_path),
        HF_HUB_OFFLINE="1",
    ).stdout
    assert hub.num_connections == num_connections


def test_download_to_a_data_volume(hub: Hub, tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = download_weights(hub, tmp_path, "org/model", "--revision", "refs/pr/7", HUGGINGFACE_HUB_CACHE=str(data))
    assert done.returncode == 0
    assert (data / "models--org--model" / "snapshots" / OTHER_COMMIT / "config.json").is_file()
    assert not (tmp_path / "hub").exists()


def test_cached_model_survives_the_hub(hub: Hub, tmp_path: Path) -> None:
    assert download_weights(hub, tmp_path, "org/model").returncode == 0
    done = download_weights(hub, tmp_path, "org/model", HF_ENDPOINT=NOWHERE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["download-weights", "org/absent"], 1, "error: Model 'org/absent' is not on the hub"),
        (["download-weights", "org/model", "--extension", ".bin"], 1, "only .safetensors are fetched"),
        (["download-weights", "org/model", "--revision", "v9"], 1, "Check --revision"),
        (["download-weights", "embedded"], 0, "Files are already present on the host. Skipping download."),
        (["download-weights", "org/model", "--auto-convert", "--no-merge-lora", "--trust-remote-code"], 0, "Files are"),
        (["download-weights"], 2, "MODEL_ID"),
        (["serve", "org/model", "--sharded"], 2, "run text-generation-launcher"),
        (["quantize", "org/model"], 2, "OUTPUT_DIR"),
        (
            ["quantize", "org/model", "out", "--upload-to-model-id", "org/other"],
            2,
            "upload the folder with `hf upload`",
        ),
        ([], 2, "COMMAND"),
    ],
)
def test_server_command(hub: Hub, tmp_path: Path, arguments: list[str], status: int, text: str) -> None:
    done = run(
        "text_generation_inference.launch.server_command", *arguments, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path)
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert text in done.stderr and "Traceback" not in done.stderr
