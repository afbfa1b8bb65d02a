"""The commands that README names: nothing of the suite is left out, and what CI runs is what a user is told to run."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands(target: str) -> list[list[str]]:
    """What `make TARGET` would run."""
    shown = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [line.split() for line in shown.stdout.splitlines()]


def folders_of_tests(target: str) -> set[str]:
    return {
        word for command in commands(target) if "pytest" in command for word in command if word.startswith("tests/")
    }


def test_every_file_of_tests_is_run_once():
    named = [word for command in commands("test") if "pytest" in command for word in command[: command.index("||")]]
    for path in (ROOT / "tests").glob("*/test_*.py"):
        ways = (f"tests/{path.parent.name}", f"tests/{path.parent.name}/{path.name}")
        assert sum(word in ways for word in named) == 1, path


def test_check_is_lint_and_the_fast_tests():
    assert [command for command in commands("check") if "pytest" not in command] == commands("lint")
    assert folders_of_tests("check") == {"tests/unit", "tests/properties"}


def test_the_torch_of_gaudi_in_ci_is_one_of_these_versions():
    """Checked with hashes: each has a lock file."""
    shown = [command for command in commands("check-gaudi-torch") if "tools/gaudi_torch.py" in command]
    versions = [command[command.index("tools/gaudi_torch.py") + 2] for command in shown]
    assert versions == ["2.7.1", "2.9.0"]
    for version in versions:
        lock = (ROOT / "tests" / "devices" / f"torch-{version}.lock").read_text()
        assert f"torch=={version} " in lock and "numpy==1.26.4 " in lock and "--hash=sha256:" in lock


def test_ci_runs_what_the_readme_says():
    run = (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    for target in ("lint", "test"):
        assert re.search(rf"^make {target}$", run, re.MULTILINE)
        assert f"make {target}" in readme
    assert re.search(r"^make --jobs 2 check-gaudi-torch$", run, re.MULTILINE)
    assert re.search(r"^make check-gaudi-3$", run, re.MULTILINE)
    assert "make check" in readme and (ROOT / ".ci" / "run").stat().st_mode & 0o100
