"""Tests share what is in helper modules and `conftest`, and never import each other: a file can be run and read alone."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
IMPORT = re.compile(r"^\s*(?:from|import)\s+(?:[\w.]+\.)?(test_\w+)", re.MULTILINE)


def test_no_test_file_imports_another() -> None:
    names = {path.stem for path in TESTS.rglob("test_*.py")}
    found = {
        path.relative_to(TESTS).as_posix(): sorted(set(IMPORT.findall(path.read_text())) & names)
        for path in TESTS.rglob("*.py")
    }
    assert {path: imported for path, imported in found.items() if imported} == {}


def test_imports_are_found() -> None:
    assert IMPORT.findall(
        "import test_hpu\n    from tests.unit.test_fp8 import weight\nfrom terminal import Screen"
    ) == [
        "test_hpu",
        "test_fp8",
    ]
