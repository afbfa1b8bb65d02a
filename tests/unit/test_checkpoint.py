"""Reading safetensors: right values, only the slice asked for, and a clear refusal of everything unsound."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import tiny_gguf
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from text_generation_inference.errors import ModelFormatError, TgiError
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.convert import convert_gguf

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(4, 6),
    "b": torch.arange(8, dtype=torch.bfloat16),
    "c": torch.arange(30, dtype=torch.float16).reshape(2, 3, 5),
}


def write_shards(folder: Path) -> None:
    save_file({"a": TENSORS["a"]}, folder / "model-1.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / "model-2.safetensors")
    placed = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def check_all(checkpoint: Checkpoint) -> None:
    assert checkpoint.names() == ["a", "b", "c"]
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
        assert torch.equal(checkpoint.read(name), tensor)


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"x": TENSORS["a"]}, tmp_path / "other.safetensors")
    check_all(Checkpoint.open(tmp_path))


def test_shards_with_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": TENSORS["a"]}, tmp_path / "consolidated.safetensors")
    check_all(Checkpoint.open(tmp_path))


def test_shards_without_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    check_all(Checkpoint.open(tmp_path))


@pytest.mark.parametrize(
    ("name", "dim", "start", "end"),
    [("a", 0, 1, 3), ("a", 1, 2, 5), ("a", -1, 2, 5), ("b", 0, 4, 8), ("c", 1, 0, 2), ("c", 2, 4, 5), ("a", 0, 2, 2)],
)
def test_slices(tmp_path: Path, name: str, dim: int, start: int, end: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    part = Checkpoint.open(tmp_path).read(name, dim, start, end)
    assert torch.equal(part, TENSORS[name].narrow(dim, start, end - start))


def test_open_ended_slices(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("a", 1, start=2), TENSORS["a"][:, 2:])
    assert torch.equal(checkpoint.read("a", 0, end=3), TENSORS["a"][:3])


@pytest.mark.parametrize(("start", "end"), [(0, 5), (-1, 2), (3, 2)])
def test_no_such_range(tmp_path: Path, start: int, end: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no range of dimension 0"):
        Checkpoint.open(tmp_path).read("a", 0, start, end)


def test_no_such_tensor(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    for ask in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(ModelFormatError, match="has no tensor 'z'"):
            ask("z")


def test_name_in_two_files(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file(TENSORS, tmp_path / "two.safetensors")
    with pytest.raises(ModelFormatError, match=r"two\.safetensors: tensor 'a' is also in one\.safetensors"):
        Checkpoint.open(tmp_path)


def test_index_lists_a_missing_file(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model-2\.safetensors: is listed in .* but missing"):
        Checkpoint.open(tmp_path)


def test_index_places_a_tensor_wrongly(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"b": TENSORS["b"]}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelFormatError, match=r"model-2\.safetensors: lacks tensor 'c'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("{", "not valid JSON"),
        ("[" * 100000, "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "no `weight_map`"),
        ('{"weight_map": {"a": 5}}', "no .safetensors file of this folder"),
        ('{"weight_map": {"a": "../model-1.safetensors"}}', "no .safetensors file of this folder"),
        ('{"weight_map": {"a": "/model-1.safetensors"}}', "no .safetensors file of this folder"),
        ('{"weight_map": {"a": "model.bin"}}', "no .safetensors file of this folder"),
    ],
)
def test_damaged_index(tmp_path: Path, content: str, cause: str) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelFormatError, match=cause) as caught:
        Checkpoint.open(tmp_path)
    assert "index.json" in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / name).write_bytes(b"anything")
    with pytest.raises(ModelFormatError, match="Pickled weights can run code.* OPT, .*If you trust them") as caught:
        Checkpoint.open(folder)
    assert name in str(caught.value) and f"serve the folder {folder}: python -c" in str(caught.value)


def test_no_weights(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "ggml.safetensors")
    with pytest.raises(ModelFormatError, match=r"holds no \.safetensors file"):
        Checkpoint.open(tmp_path)


def raw(header: dict[str, object] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int, shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape or [(end - start) // 4], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        raw(b"", length=2**63),
        raw(b"", length=10**8),
        raw(b"{"),
        raw(b"\xff\xfe"),
        raw({"a": 5}),
        raw({"a": entry(0, 8)}, bytes(4)),
        raw({"a": entry(0, 8)}, bytes(12)),
        raw({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        raw({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)),
        raw({"a": entry(8, 0)}, bytes(8)),
        raw({"a": entry(0, 8, [2**40, 2**40])}, bytes(8)),
        raw({"a": entry(0, 8) | {"dtype": "X9"}}, bytes(8)),
        raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, bytes(8)),
    ],
)
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: is not a sound safetensors file") as caught:
        Checkpoint.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_unsupported_type(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw({"a": entry(0, 8) | {"dtype": "C64", "shape": [1]}}, bytes(8)))
    with pytest.raises(ModelFormatError, match=r"model\.safetensors: tensor 'a' has the unsupported type C64"):
        Checkpoint.open(tmp_path)


@settings(max_examples=300, deadline=5000, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_and_truncated_files(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 220))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        checkpoint = Checkpoint.open(tmp_path)
        for name in checkpoint.names():
            assert checkpoint.read(name).dtype == checkpoint.dtype(name)
    except TgiError as error:
        assert "\n" not in str(error)


def test_blocks(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "a.gguf", quantise="Q4_1")
    convert_gguf(path, tmp_path / "out")
    checkpoint = Checkpoint.open(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    assert checkpoint.block_types[name] == "Q4_1"
    found = checkpoint.read(name, is_blocks=True)
    assert found.dtype == torch.uint8 and found.shape == (tiny_gguf.HIDDEN, tiny_gguf.INNER // 32 * 20)
    assert "model.norm.weight" not in checkpoint.block_types
    assert "model.norm.weight" in checkpoint.names()
    shutil.copy(tmp_path / "out" / "model.safetensors", tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).block_types == {}


def test_damaged_blocks(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "ggml.safetensors").write_bytes(bytes(20))
    with pytest.raises(ModelFormatError, match=r"ggml\.safetensors: is not a sound"):
        Checkpoint.open(tmp_path)
