"""Tensors that are moved in pieces arrive as they were."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tgi.weights.checkpoint import Checkpoint
from tgi.weights.upload import Upload

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (7,), (64, 16), (33, 129), (3, 5, 1000), (0, 4)])
def test_every_byte_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    original = torch.randint(0, 100, shape, dtype=torch.int32).to(dtype)
    with Upload(CPU, piece_bytes=256) as upload:
        moved = [upload(original) for _ in range(3)]
    for copy in moved:
        assert (copy.shape, copy.dtype) == (original.shape, original.dtype)
        assert torch.equal(copy.view(torch.uint8), original.view(torch.uint8))


def test_a_view_arrives_as_what_it_shows() -> None:
    whole = torch.randn(50, 40)
    with Upload(CPU, piece_bytes=128) as upload:
        assert torch.equal(upload(whole[:, 3:17]), whole[:, 3:17])
        assert torch.equal(upload(whole.t()), whole.t())


def test_a_checkpoint_reads_through_it(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(100, 30), "b": torch.randn(5).to(torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with Upload(CPU, piece_bytes=512) as upload:
        checkpoint.upload = upload
        assert torch.equal(checkpoint.read("a"), tensors["a"])
        assert torch.equal(checkpoint.read("a", 0, 10, 60), tensors["a"][10:60])
        assert torch.equal(checkpoint.read("b"), tensors["b"])


def test_an_error_on_a_thread_is_the_callers() -> None:
    with Upload(CPU, piece_bytes=64) as upload, pytest.raises(RuntimeError):
        upload(torch.zeros(100, device="meta"))
