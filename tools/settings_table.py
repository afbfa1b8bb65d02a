#!/usr/bin/env python3
"""Write the table of settings in docs/cli.md again, from what stands on the settings themselves."""

from pathlib import Path

from text_generation_inference.config import SETTINGS, flag_of, variable_of
from text_generation_inference.launch.arguments import default_of, sections

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
START, END = "<!-- settings: tools/settings_table.py -->\n", "<!-- end of settings -->\n"


def table() -> str:
    """Every flag, by section, with its variable, default and range."""
    lines: list[str] = []
    for section, names in sections(with_flags=True).items():
        lines += [f"### {section.partition(' (')[0].capitalize()}", ""]
        lines += ["| Flag | Variable | Default | Meaning |", "|---|---|---|---|"]
        lines += [row(name) for name in names]
        lines += [""]
    return "\n".join(lines)


def row(name: str) -> str:
    setting, variable = SETTINGS[name], variable_of(name)
    if variable and setting.turns_off and not setting.negated:
        variable += "=0"
    flags = [part for part in (flag_of(name), setting.short) if part]
    limits = [text for text in (setting.range, ", ".join(setting.choices)) if text]
    meaning = setting.help + (f" ({'; '.join(limits)})" if limits else "")
    cells = [
        ", ".join(f"`{flag}`" for flag in flags),
        f"`{variable}`" if variable else "",
        default_of(name) if setting.value else "",
        meaning,
    ]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def write() -> None:
    text = PAGE.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    PAGE.write_text(before + START + "\n" + table() + "\n" + END + after)


if __name__ == "__main__":
    write()
