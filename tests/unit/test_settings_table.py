"""A setting is said once: docs/cli.md shows what stands on it."""

import runpy
from pathlib import Path

import pytest

from text_generation_inference.config import SETTINGS, ServerConfig, flag_of, variable_of
from text_generation_inference.errors import StartError

ROOT = Path(__file__).parents[2]


def test_the_page_shows_every_flag_as_it_is() -> None:
    table = runpy.run_path(str(ROOT / "tools" / "settings_table.py"))["table"]()
    assert table in (ROOT / "docs" / "cli.md").read_text(), "run: .venv/bin/python tools/settings_table.py"
    for name in SETTINGS:
        assert flag_of(name) is None or f"| `{flag_of(name)}`" in table, name


def test_every_variable_is_on_a_page() -> None:
    pages = "".join((ROOT / "docs" / page).read_text() for page in ("cli.md", "environment.md", "compatibility.md"))
    bounds = {name for name, setting in SETTINGS.items() if setting.listed}
    unknown = {name for name in SETTINGS if (variable := variable_of(name)) and variable not in pages} - bounds
    assert unknown == set()
    assert {SETTINGS[name].listed for name in bounds} <= set(pages.split("`"))


def test_names_are_told_apart() -> None:
    for names in ([flag_of(name) for name in SETTINGS], [variable_of(name) for name in SETTINGS]):
        given = [name for name in names if name]
        assert len(given) == len(set(given))


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.range])
def test_every_range_is_checked(name: str) -> None:
    setting = SETTINGS[name]
    low = setting.above if setting.above is not None else setting.least
    high = setting.below if setting.below is not None else setting.most
    outside = [bound for bound in (setting.above, setting.below) if bound is not None]
    outside += [low - 1] if low is not None else []
    outside += [high + 1] if high is not None else []
    for value in outside:
        with pytest.raises(StartError, match=f"^`{name}` must be "):
            ServerConfig(**{name: value}).check()
