"""Conversion: exact values and blocks, written whole or not at all, once, in little memory."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf
from filelock import FileLock
from safetensors import safe_open
from safetensors.numpy import load_file

from text_generation_inference.errors import ModelFormatError, ResourceError
from text_generation_inference.weights import cache
from text_generation_inference.weights.convert import cache_folder, convert_gguf, probe_digest

FILES = ["complete.json", "config.json", "generation_config.json", "ggml.safetensors", "model.safetensors"]
FILES += ["tokenizer.json", "tokenizer_config.json"]


def visible(folder: Path) -> list[str]:
    """What conversion left in the cache, locks aside."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", ""])
def test_values_and_blocks_are_exact(tmp_path: Path, kind: str) -> None:
    originals = tiny_gguf.weights()
    tensors = dict(originals)
    for name, value in originals.items():
        if ".attn_q." in name or ".attn_k." in name:
            tensors[name] = tiny_gguf.permute_rows(value, tiny_gguf.HEADS if "_q." in name else tiny_gguf.KV_HEADS)
    path = tiny_gguf.write(tmp_path / "a.gguf", tensors=tensors, quantise=kind)
    assert convert_gguf(path, tmp_path / "cache" / "out")
    folder = tmp_path / "cache" / "out"
    assert visible(folder) == FILES
    values = load_file(folder / "model.safetensors")
    blocks = load_file(folder / "ggml.safetensors")
    kept = {
        "model.layers.1.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
    }
    with safe_open(folder / "ggml.safetensors", framework="np") as file:
        types = file.metadata() or {}
    for original, name in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ]:
        expected = originals[original]
        if kind and expected.ndim == 2:
            quantised = gguf.quantize(expected, tiny_gguf.BLOCK_TYPE[kind])
            expected = gguf.dequantize(quantised, tiny_gguf.BLOCK_TYPE[kind])
            if name in blocks:
                assert types[name] == kind
                assert np.array_equal(blocks[name], quantised)
        assert values[name].dtype == np.float32
        assert np.array_equal(values[name], expected), name
    assert (kept <= blocks.keys()) == (kind in ("Q4_0", "Q4_1", "Q8_0"))
    assert "model.norm.weight" not in blocks
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    convert_gguf(tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "out", lambda *call: calls.append(call))
    done = [call for call in calls if call[0] == "converting weights"]
    assert [call[1] for call in done] == sorted(call[1] for call in done)
    assert done[-1][1] == done[-1][2] == sum(tensor.nbytes for tensor in tiny_gguf.weights().values())


def test_second_call_reuses(tmp_path: Path) -> None:
    path, out = tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "out"
    assert convert_gguf(path, out)
    before = (out / "model.safetensors").stat().st_mtime_ns
    path.unlink()
    assert not convert_gguf(path, out)
    assert (out / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["missing", "shorter", "no manifest"])
def test_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    path, out = tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "out"
    convert_gguf(path, out)
    whole = (out / "model.safetensors").read_bytes()
    match damage:
        case "missing":
            (out / "model.safetensors").unlink()
        case "shorter":
            (out / "model.safetensors").write_bytes(whole[:-1])
        case _:
            (out / "complete.json").unlink()
    assert convert_gguf(path, out)
    assert (out / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_interruption_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    path, folder = tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "cache"
    seen: list[list[str]] = []

    def stop(stage: str, done: int, total: int) -> None:
        if total and done > total // 2:
            seen.append(visible(folder))
            raise failure

    with pytest.raises(failure):
        convert_gguf(path, folder / "out", stop)
    assert seen == [[f".out.tmp-{os.getpid()}"]]  # it was at work, beside its target
    assert visible(folder) == []
    assert convert_gguf(path, folder / "out")


def test_refused_file_leaves_nothing(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.metadata(arch="mamba"))
    with pytest.raises(ModelFormatError):
        convert_gguf(path, tmp_path / "cache" / "out")
    assert not (tmp_path / "cache").exists()


def test_leftovers_of_dead_processes_go(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    names = [".out.tmp-4194304", f".out.tmp-{os.getpid()}", ".other-1.tmp-4194304"]
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(bytes(100))
    convert_gguf(tiny_gguf.write(tmp_path / "a.gguf"), folder / "out")
    assert visible(folder) == ["out"]


def test_work_of_a_living_process_stays(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / ".other.tmp-1").mkdir(parents=True)
    with FileLock(folder / ".other.lock"):
        convert_gguf(tiny_gguf.write(tmp_path / "a.gguf"), folder / "out")
    assert visible(folder) == [".other.tmp-1", "out"]


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both succeed and exactly one converts, whoever comes first."""
    path, out = tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "cache" / "out"
    code = (
        "import sys, time; from pathlib import Path; from text_generation_inference.weights.convert import convert_gguf\n"
        "slow = lambda stage, done, total: time.sleep(0.02)\n"
        "print(convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), slow))"
    )
    command = [sys.executable, "-c", code, str(path), str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = sorted(process.communicate(timeout=30)[0].strip() for process in both)
    assert said == ["False", "True"]
    assert visible(out.parent) == ["out"] and cache.is_complete(out)


Usage = namedtuple("Usage", ["total", "used", "free"])


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "cache"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(ResourceError, match=r"cache: .* needs \d+ MB, 1 MB are free.*--cache-dir or TGI_CACHE_DIR"):
        convert_gguf(path, folder / "out")
    assert visible(folder) == []


def test_disk_fills_up(tmp_path: Path) -> None:
    path, folder = tiny_gguf.write(tmp_path / "a.gguf"), tmp_path / "cache"

    def full(stage: str, done: int, total: int) -> None:
        if total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ResourceError, match=r"Not enough disk space in .*cache: .*TGI_CACHE_DIR"):
        convert_gguf(path, folder / "out", full)
    assert visible(folder) == []


def test_cache_cannot_be_written(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "a.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"Cannot write to the cache .*--cache-dir or TGI_CACHE_DIR"):
        convert_gguf(path, tmp_path / "file" / "out")


def test_memory_stays_small(tmp_path: Path) -> None:
    """A matrix of 33 MB passes through in slices."""
    rows = 2**17
    tensors = tiny_gguf.weights() | {"token_embd.weight": np.ones((rows, tiny_gguf.HIDDEN), np.float32)}
    path = tiny_gguf.write(tmp_path / "a.gguf", tensors=tensors, quantise="Q8_0")
    del tensors
    tracemalloc.start()
    try:
        convert_gguf(path, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        last = file.get_slice("model.embed_tokens.weight")[rows - 1 :, :]
    assert last.shape == (1, tiny_gguf.HIDDEN) and np.allclose(last, 1.0, rtol=1e-2)


def test_folder_name_follows_the_file(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "a.gguf")
    first = probe_digest(path)
    assert first == probe_digest(path)
    os.utime(path, ns=(0, 1))
    touched = probe_digest(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 1))
    assert len({first, touched, probe_digest(path)}) == 3
    assert cache_folder(tmp_path, "../My Model", "0123456789abcdef99").name == "_My_Model-0123456789abcdef-v5"
