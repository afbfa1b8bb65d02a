"""Markdown tables made to fit a terminal: one that is too wide is split by columns, each part with the row names.

Standard library only. Elsewhere than on a terminal, tables stay as they are.
"""

import re
import shutil
import sys
import textwrap

_CELLS = re.compile(r"(?<!\\)\|")
_PERCENTILE = re.compile(r"p\d\d?\b")


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
    tables: list[str] = []
    for number, part in enumerate(parts):
        shown = [*names, *part]
        tables += [""] if number else []
        for row in (heads, rule, *rows):
            cells = [_cell(row[column], widths[column], rule[column], row is rule) for column in shown]
            tables.append(f"| {' | '.join(cells)} |")
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


def _cell(text: str, width: int, rule: str, is_rule: bool) -> str:
    if is_rule:
        return (":" if rule.startswith(":") else "-") + "-" * (width - 2) + (":" if rule.endswith(":") else "-")
    return text.rjust(width) if rule.endswith(":") and not rule.startswith(":") else text.ljust(width)


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
