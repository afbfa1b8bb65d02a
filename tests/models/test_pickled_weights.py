"""Commands that a refusal of pickled weights gives: they convert any model, whatever its folder is called."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.model_files import explain_pickles


def test_the_command_for_pickles_converts_them(tmp_path: Path) -> None:
    """Whatever computes the model, and whichever tensors share memory."""
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(4, dtype=torch.bfloat16)}
    for number, found in enumerate((tensors, {"c": tensors["b"], "d": tensors["b"]}), 1):
        torch.save(found, tmp_path / f"pytorch_model-{number:05}-of-00002.bin")
    (tmp_path / "training_args.bin").write_bytes(b"anything")
    with pytest.raises(ModelFormatError) as caught:
        Checkpoint.open(tmp_path)
    code = str(caught.value).split('python -c "')[1].rstrip('"')
    subprocess.run([sys.executable, "-c", code], check=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.names()) == ["a", "b", "c", "d"]
    for name, expected in (tensors | {"c": tensors["b"], "d": tensors["b"]}).items():
        assert torch.equal(checkpoint.read(name), expected) and checkpoint.dtype(name) is expected.dtype


@pytest.mark.parametrize(
    "name",
    [
        "plain-1.0_b",
        "two words; touch made",
        "it's $HOME",
        "many*[a-z]?",
        "back\\slash\nöffnen 😀",
        '$(touch made) it\'s `touch made` "*[b]" !!',
    ],
)
def test_the_command_for_pickles_takes_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    """As a shell reads it, which finds nothing in the name to run or to replace."""
    folder = tmp_path / "models" / name
    folder.mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelFormatError) as caught:
        Checkpoint.open(folder)
    command = str(caught.value).split(f"serve the folder {folder}: ")[1]
    assert command.startswith("python -c ")
    run_in_shell(command, tmp_path)
    assert torch.equal(Checkpoint.open(folder).read("a"), torch.ones(2))
    assert sorted(each.name for each in folder.iterdir()) == ["pytorch_model.bin", "pytorch_model.safetensors"]
    assert [each.name for each in tmp_path.rglob("made")] == []


def run_in_shell(command: str, folder: Path) -> None:
    python = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}'
    subprocess.run(["sh", "-c", f"{python}\n{command}"], check=True, cwd=folder)


@pytest.mark.parametrize("name", ["it's $(touch made)", "~"])
def test_the_commands_for_pickles_on_the_hub_take_any_name(tmp_path: Path, name: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "source.bin")
    fetch = 'hf() { [ "$1 $3" = "download --local-dir" ] && mkdir -- "$4" && mv source.bin "$4/pytorch_model.bin"; }'
    command = explain_pickles(f"org/{name}").split(f"serve the folder {name}: ")[1]
    run_in_shell(f"{fetch}\n{command}", tmp_path)
    assert sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*.*")) == [
        f"{name}/pytorch_model.bin",
        f"{name}/pytorch_model.safetensors",
    ]
