"""Scripts of bench/ run by hand, some on machines that are seldom there: what they import of the package exists."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "text_generation_inference"
SCRIPTS = sorted((ROOT / "bench").glob("*.py"))


def source_of(module: str) -> Path | None:
    path = ROOT / "src" / module.replace(".", "/")
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return found[0] if found else None


@cache
def names_of(module: str) -> set[str]:
    """What a module defines or imports, and what lies in its folder, without running it."""
    source = source_of(module)
    assert source is not None, f"there is no {module}"
    names = {file.stem for file in source.parent.iterdir()} if source.stem == "__init__" else set()
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_exists(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            missing = [alias.name for alias in node.names if alias.name not in names_of(node.module or "")]
            assert not missing, f"{node.module} has no {missing}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    assert source_of(alias.name), f"there is no {alias.name}"


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) > 10 and importlib.util.find_spec(PACKAGE)
