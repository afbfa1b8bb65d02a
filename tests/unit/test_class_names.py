"""One class name is one class: whoever reads a name knows what it is."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "text_generation_inference"


def classes() -> dict[str, list[str]]:
    """The files that define a class at their top level, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(SOURCE).as_posix())
    return found


def test_one_name_one_class() -> None:
    assert {name: files for name, files in classes().items() if len(files) > 1} == {}
