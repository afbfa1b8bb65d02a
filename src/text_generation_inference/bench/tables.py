"""Tables of results, said once: a column knows its value, and both the terminal and the page are made from it.

On a terminal a table is Markdown with the units in its cells, split by columns where it is too wide; on the page the
units stand in the heads. Standard library only.
"""

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

_CELLS = re.compile(r"(?<!\\)\|")
_PERCENTILE = re.compile(r"p\d\d?\b")


class Column(msgspec.Struct, frozen=True):
    head: str
    value: Callable[[Any], float | str | None]  # of what a row is about
    form: str = ".2f"  # of a number
    unit: str = ""
    optional: bool = False  # left out where no row has a value


class Table(msgspec.Struct):
    """The first `num_names` columns say what a row is about; a name that the row above has too stands once."""

    caption: str
    heads: list[str]
    rows: list[list[str]]
    num_names: int = 1


def make_table(caption: str, columns: Sequence[Column], items: Sequence[Any], num_names: int = 1) -> Table:
    """For the page."""
    shown, cells = _fill(columns, items)
    heads = [f"{column.head}, {column.unit}" if column.unit else column.head for column in shown]
    rows = [[_page_cell(column, value) for column, value in zip(shown, row, strict=True)] for row in cells]
    return Table(caption, heads, rows, num_names)


def markdown_table(columns: Sequence[Column], items: Sequence[Any]) -> str:
    return markdown(*text_cells(columns, items))


def text_cells(columns: Sequence[Column], items: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells for a terminal."""
    shown, cells = _fill(columns, items)
    rows = [[_cell(column, value) for column, value in zip(shown, row, strict=True)] for row in cells]
    return [column.head for column in shown], rows


def _fill(columns: Sequence[Column], items: Sequence[Any]) -> tuple[list[Column], list[list[Any]]]:
    filled = [(column, [column.value(item) for item in items]) for column in columns]
    filled = [
        (column, values) for column, values in filled if not column.optional or any(v is not None for v in values)
    ]
    return [column for column, _ in filled], [[values[at] for _, values in filled] for at in range(len(items))]


def _cell(column: Column, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    text = "NaN" if math.isnan(value) else f"{value:{column.form}}"
    return f"{text} {column.unit}" if column.unit else text


def _page_cell(column: Column, value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "–" if value is None or math.isnan(value) else f"{value:,{column.form.removeprefix(',')}}"


def markdown(heads: list[str], rows: list[list[str]], plain: bool = False) -> str:
    """Aligned: the first column to the left, the others to the right unless their heads say names; `plain`: all to the
    left, with a plain rule."""
    left = [plain or column == 0 or head in ("kernel", "part", "model") for column, head in enumerate(heads)]
    return "\n".join(_lines(heads, rows, left, plain))


def _lines(heads: list[str], rows: list[list[str]], left: list[bool], plain: bool) -> list[str]:
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]
    columns = list(zip(widths, left, strict=True))

    def line(cells: list[str]) -> str:
        padded = [
            f"{cell:{'<' if is_left else '>'}{width}}" for cell, (width, is_left) in zip(cells, columns, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = line([":" + "-" * (width - 1) if is_left else "-" * (width - 1) + ":" for width, is_left in columns])
    if plain:
        rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return [line(heads), rule, *(line(row) for row in rows)]


# -- within the width of a terminal --------------------------------------------------------------------------------


def show(text: str) -> None:
    """Print to standard output, in lines that the terminal need not break."""
    print(fit(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text, flush=True)


def fit(text: str, width: int) -> str:
    """Tables are split and other lines wrapped where they are wider than `width` columns."""
    lines, made = text.split("\n"), []
    while lines:
        count = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
        part = lines[: max(count, 1)]
        lines = lines[len(part) :]
        if max(map(len, part)) <= width:
            made += part
        elif count > 2:
            made += _split(part, width)
        else:
            made += textwrap.wrap(part[0], width, break_on_hyphens=False)
    return "\n".join(made)


def _split(lines: list[str], width: int) -> list[str]:
    heads, rule, *rows = ([cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in lines)
    heads = _whole_heads(heads)
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    # Rows are known by their first column, or by two where the first is empty below its first row.
    num_names = 2 if any(not row[0] for row in rows) else 1
    names = list(range(num_names))
    used = _table_width([widths[column] for column in names])
    if any(used + 3 + one > width for one in widths[num_names:]):
        return _stack(heads, rows, num_names, width)
    parts: list[list[int]] = []
    room = 0
    for column in range(num_names, len(heads)):
        if not parts or widths[column] + 3 > room:
            parts.append([])
            room = width - used
        parts[-1].append(column)
        room -= widths[column] + 3
    left, plain = [not mark.endswith(":") for mark in rule], not any(":" in mark for mark in rule)
    tables: list[str] = []
    for number, part in enumerate(parts):
        shown = [*names, *part]
        heads_, *rows_ = ([row[column] for column in shown] for row in (heads, *rows))
        tables += [*([""] if number else []), *_lines(heads_, rows_, [left[column] for column in shown], plain)]
    return tables


def _whole_heads(heads: list[str]) -> list[str]:
    """`TTFT p50`, `p90` becomes `TTFT p50`, `TTFT p90`: in another part of the table nobody could tell."""
    whole: list[str] = []
    for head in heads:
        before = _PERCENTILE.split(whole[-1])[0] if whole and _PERCENTILE.search(whole[-1]) else ""
        whole.append(before + head if before.strip() and _PERCENTILE.match(head) else head)
    return whole


def _table_width(widths: list[int]) -> int:
    return sum(widths) + 3 * len(widths) + 1


def _stack(heads: list[str], rows: list[list[str]], num_names: int, width: int) -> list[str]:
    """A line for each value, where not even two columns fit."""
    lines: list[str] = []
    first = ""
    for row in rows:
        first = row[0] or first
        lines += textwrap.wrap(" ".join([first, *row[1:num_names]]), width)
        for head, cell in list(zip(heads, row, strict=True))[num_names:]:
            lines += textwrap.wrap(f"  {head}: {cell}", width, subsequent_indent="    ")
    return lines
