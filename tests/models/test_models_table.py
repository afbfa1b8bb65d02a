"""docs/models.md shows the registry as it is."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_shows_every_architecture() -> None:
    table = runpy.run_path(str(ROOT / "tools" / "models_table.py"))["table"]()
    assert table in (ROOT / "docs" / "models.md").read_text(), "run: .venv/bin/python tools/models_table.py"
