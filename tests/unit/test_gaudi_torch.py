"""What is said where the torch of a Gaudi release cannot be had, and when that is a failure."""

import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "gaudi_torch.py"
LISTED = "2.0.0, 2.1.0, 2.2.0, 2.3.0, 2.4.0, 2.5.0, 2.6.0"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """The tool with a pip that ends as said."""

    def run(said: str) -> int:
        tool = runpy.run_path(str(TOOL))
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
        program.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", str(program))
            return tool["main"](tmp_path / "made", "2.7.1", "-c", "raise SystemExit(9)")

    return run


@pytest.mark.parametrize(
    ("ci", "offered", "status", "why"),
    [
        ("", LISTED, 0, "not offered"),
        ("true", LISTED, 1, "not offered"),
        ("true", "none", 0, "no index"),
        ("true", "2.13.0+cpu, 2.14.1", 0, "no index"),
    ],
)
def test_a_torch_that_is_not_offered(
    make: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    ci: str,
    offered: str,
    status: int,
    why: str,
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("TORCHES_TESTED", str(tmp_path / "lines"))
    said = f"ERROR: No matching distribution found for torch==2.7.1 (from versions: {offered})"
    assert make(said) == status
    printed = capsys.readouterr().out
    assert "torch 2.7.1 with NumPy 1.26.4 is not offered" in printed and "Nothing was tested with it." in printed
    assert (tmp_path / "lines").read_text() == f"NOT TESTED with torch 2.7.1: {why}\n"


def test_any_other_failure_is_one(make: Callable[[str], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failure:
        make("ERROR: Could not install packages: No space left on device")
    assert failure.value.code == 1
    assert "No space left on device" in capsys.readouterr().err


def run_ci(folder: Path, make: str) -> str:
    """What `.ci/run` says last, with a make that does this."""
    (folder / ".ci").mkdir()
    script = folder / ".ci" / "run"
    script.write_bytes((TOOL.parents[1] / ".ci" / "run").read_bytes())
    (folder / "make").write_text(f"#!/bin/sh\n{make}\n")
    (folder / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split("Gaudi:\n")[-1]


def test_ci_ends_with_what_was_tested(tmp_path: Path) -> None:
    line = "NOT TESTED with torch 2.7.1: no index"
    assert run_ci(tmp_path, f'[ "$3" != check-gaudi-torch ] || echo "{line}" >> "$TORCHES_TESTED"') == f"{line}\n"


def test_ci_that_ended_before_says_so(tmp_path: Path) -> None:
    assert run_ci(tmp_path, '[ "$1" != lint ]') == "NOT TESTED with any torch of its releases\n"
