"""Tables that say what each number belongs to, and that can be pushed sideways on a narrow screen.

Standard library only.
"""

from collections.abc import Sequence

from text_generation_inference.bench.page.markup import Markup, tag

_SHORT = 12  # rows that stay on one sheet of paper
_SHORT_NAME = 20


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], groups: int = 1) -> Markup:
    """The first `groups` columns are names; a name equal to the one above it stands once for both."""
    head = tag("tr", (tag("th", name, scope="col", class_=_kind(name, at, groups)) for at, name in enumerate(heads)))
    body: list[Markup] = []
    for number, row in enumerate(rows):
        cells: list[Markup] = []
        for column, cell in enumerate(row):
            if column >= groups:
                cells.append(tag("td", cell))
            elif column == groups - 1:
                cells.append(tag("th", cell, scope="row", class_=_kind(cell, column, groups)))
            elif number == 0 or rows[number - 1][: column + 1] != row[: column + 1]:
                span = _span(rows, number, column)
                cells.append(tag("th", cell, scope="rowgroup", rowspan=span, class_=_kind(cell, column, groups)))
        first = groups > 1 and (number == 0 or rows[number - 1][0] != row[0])
        body.append(tag("tr", cells, class_="first" if first and number else None))
    whole = tag("table", tag("caption", tag("span", caption)), tag("thead", head), tag("tbody", body))
    kind = "scroll short" if len(rows) <= _SHORT else "scroll"
    return tag("div", whole, class_=kind, tabindex=0, role="region", aria_label=caption)


def _kind(text: str, column: int, groups: int) -> str | None:
    """The class of a cell: a short name is not broken."""
    if column == 0:
        return "lead whole" if len(text) <= _SHORT_NAME else "lead"
    return "name" if column < groups else None


def _span(rows: Sequence[Sequence[str]], start: int, column: int) -> int:
    """How many rows from `start` on have the same names up to this column."""
    end = start
    while end < len(rows) and rows[end][: column + 1] == rows[start][: column + 1]:
        end += 1
    return end - start
