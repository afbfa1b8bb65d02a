"""Charts in characters: a histogram of bars, and points over two axes joined by a line of braille dots.

Never torch. A chart is a block: lines of one width.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

Block = list[Text]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column
_MUTED = "bright_black"
_FULL_HEIGHT = 4  # runs in a bar of full height, at least: a single run is no tower


class Point(NamedTuple):
    x: float
    y: float
    name: str
    chosen: bool


def short(value: float) -> str:
    """A number in at most five characters or so: 0.031, 4.25, 98.1, 512, 1.2k, 35k, 1.2M."""
    size = abs(value)
    if size >= 1e12 or not math.isfinite(value):
        return f"{value:.0e}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:.{0 if abs(scaled) >= 99.5 else 1}f}".removesuffix(".0") + unit
    digits = 0 if size >= 100 or value == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def blank(width: int, height: int, words: str = "") -> Block:
    """Nothing, or a few words in the middle of it."""
    lines = [Text(" " * width) for _ in range(height)]
    if words and height > 0 and len(words) <= width:
        lines[(height - 1) // 2] = Text(words.center(width), style=_MUTED)
    return lines


# -- histogram -----------------------------------------------------------------------------------------------------


def count_bins(values: Sequence[float], num_bins: int) -> tuple[list[int], float, float]:
    """(values in each of equally wide bins, the lowest value, the highest). The highest is in the last bin."""
    low, high = min(values), max(values)
    counts = [0] * num_bins
    for value in values:
        place = int((value - low) / (high - low) * num_bins) if high > low else num_bins // 2
        counts[min(place, num_bins - 1)] += 1
    return counts, low, high


def histogram(values: Sequence[float], width: int, height: int, style: str, unit: str = "ms") -> Block:
    """Bars over the range of the values, which stands below. Wants at least 2 lines."""
    if not values or height < 2 or width < 8:
        return blank(width, height, "" if values else "no runs yet")
    num_bins = max(1, min(width, max(5, math.ceil(2 * math.sqrt(len(values))))))
    if num_bins % 2 == 0 and min(values) == max(values):
        num_bins -= 1  # the one bar stands in the middle
    bar = width // num_bins
    gap = 1 if bar >= 3 else 0
    margin = (width - bar * num_bins) // 2
    counts, low, high = count_bins(values, num_bins)
    shows_counts = height >= 6 and bar - gap >= len(str(max(counts)))
    rows = height - 1 - shows_counts
    most = max(_FULL_HEIGHT, *counts)
    levels = [math.ceil(count / most * rows * 8) for count in counts]
    lines: Block = []
    for row in range(rows - 1 + shows_counts, -1, -1):
        cells: list[str] = []
        for count, level in zip(counts, levels, strict=True):
            filled = max(0, min(8, level - 8 * row))
            on_top = shows_counts and count > 0 and -(-level // 8) == row
            inside = str(count).center(bar - gap) if on_top else _EIGHTHS[filled] * (bar - gap)
            cells.append(inside + " " * gap)
        lines.append(_fill(Text(" " * margin + "".join(cells), style=style), width))
    ends = [(0, f"{short(low)} {unit}")]
    if high > low:
        ends.append((width, f"{short(high)} {unit}"))
        if width >= 44:
            ends.append((width // 2, f"{short((low + high) / 2)} {unit}"))
    lines.append(_labels(ends, width))
    return lines


# -- points over two axes ------------------------------------------------------------------------------------------


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers that span from at most `low` to at least `high`, about `most` of them at most."""
    if not high > low:
        low, high = low - (abs(low) / 10 or 1.0), high + (abs(high) / 10 or 1.0)
    span = (high - low) / max(1, most - 1)
    unit = 10.0 ** math.floor(math.log10(span))
    factors = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if most <= 3 else (1, 2, 2.5, 5, 10)
    step = next((factor * unit for factor in factors if factor * unit >= span * (1 - 1e-9)), 10 * unit)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


class _Axis:
    """A range of numbers and the round ones to name in it."""

    def __init__(self, values: Sequence[float], zoom: bool, most: int) -> None:
        low, high = min(values), max(values)
        self.ticks = ticks(low if zoom else 0.0, high, most)
        if zoom:
            margin = (high - low) / 20 or abs(high) / 10 or 1.0
            self.low, self.high = low - margin, high + margin
            inside = [tick for tick in self.ticks if self.low <= tick <= self.high]
            self.ticks = inside if len(inside) > 1 else [self.low, self.high]
        else:
            self.low, self.high = self.ticks[0], self.ticks[-1]

    def place(self, value: float, num_places: int) -> int:
        share = (value - self.low) / (self.high - self.low)
        return max(0, min(num_places - 1, round(share * (num_places - 1))))

    def named_places(self, num_places: int) -> dict[int, str]:
        return {self.place(tick, num_places): short(tick) for tick in self.ticks}


def scatter(points: Sequence[Point], width: int, height: int, style: str, zoom: bool, x_unit: str) -> Block:
    """Points with their names, joined in their order. `zoom`: the axes cover the points only, not zero."""
    if not points or height < 3 or width < 24:
        return blank(width, height, "" if points else "no batch size is done yet")
    num_rows = height - 2
    y_axis = _Axis([point.y for point in points], zoom, max(2, min(6, num_rows // 3 + 1)))
    left = max(len(name) for name in y_axis.named_places(num_rows).values()) + 1
    num_columns = width - left - 1
    x_axis = _Axis([point.x for point in points], zoom, max(2, min(8, num_columns // 12 + 1)))

    canvas = _Canvas(num_columns, num_rows)
    across, down = canvas.num_across, canvas.num_down
    places = [(x_axis.place(point.x, across), down - 1 - y_axis.place(point.y, down)) for point in points]
    for start, end in pairwise(places):
        canvas.join(start, end)
    rows = canvas.lines(f"dim {style}")
    for point, place in sorted(zip(points, places, strict=True), key=lambda pair: pair[0].chosen):
        _mark(rows, point, place[0] // 2, place[1] // 4, style)

    lines: Block = []
    names = {num_rows - 1 - place: name for place, name in y_axis.named_places(num_rows).items()}
    for number, row in enumerate(rows):
        axis = "┤" if number in names else "│"
        line = Text(names.get(number, "").rjust(left - 1) + " " + axis, style=_MUTED)
        lines.append(line.append_text(_join(row)))
    names = x_axis.named_places(num_columns)
    floor = "".join("┬" if column in names else "─" for column in range(num_columns))
    lines.append(Text(" " * left + "└" + floor, style=_MUTED))
    spots = [(left + 1 + column, name) for column, name in names.items()]
    spots[-1] = (spots[-1][0], f"{spots[-1][1]} {x_unit}")
    lines.append(_labels([spots[0], spots[-1], *spots[1:-1]], width))
    return lines


class _Canvas:
    """Dots, two across and four down in each character."""

    def __init__(self, columns: int, rows: int) -> None:
        self._cells = [[0] * columns for _ in range(rows)]
        self.num_across, self.num_down = 2 * columns, 4 * rows

    def dot(self, across: int, down: int) -> None:
        self._cells[down // 4][across // 2] |= _DOTS[down % 4][across % 2]

    def join(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for number in range(steps + 1):
            share = number / steps
            self.dot(round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1])))

    def lines(self, style: str) -> list[list[tuple[str, str]]]:
        """Rows of (character, style)."""
        return [[(chr(_BRAILLE + cell) if cell else " ", style) for cell in row] for row in self._cells]


def _mark(rows: list[list[tuple[str, str]]], point: Point, column: int, row: int, style: str) -> None:
    """A mark, and beside it the point's name where nothing is written, else where only the line is."""
    look = "bold white" if point.chosen else f"bold {style}"
    rows[row][column] = ("◆" if point.chosen else "●", look)
    right, left = column + 2, column - 1 - len(point.name)
    for allowed in (" ", " " + "".join(map(chr, range(_BRAILLE, _BRAILLE + 256)))):
        for line, at in (
            (row, right),
            (row + 1, right),
            (row - 1, left),
            (row, left),
            (row - 1, right),
            (row + 1, left),
        ):
            end = at + len(point.name)
            if not (0 <= line < len(rows) and at >= 0 and end <= len(rows[line])):
                continue
            touches = any(character.isalnum() for character, _ in rows[line][max(0, at - 1) : end + 1])
            if not touches and all(character in allowed for character, _ in rows[line][at:end]):
                rows[line][at:end] = [(character, look) for character in point.name]
                return


# -- parts ---------------------------------------------------------------------------------------------------------


def _join(cells: list[tuple[str, str]]) -> Text:
    text = Text()
    for start, (_, style) in enumerate(cells):
        if start and cells[start - 1][1] == style:
            continue
        end = next((other for other in range(start, len(cells)) if cells[other][1] != style), len(cells))
        text.append("".join(character for character, _ in cells[start:end]), style=style)
    return text


def _labels(spots: list[tuple[int, str]], width: int) -> Text:
    """Words centred on their columns, kept inside; the first ones go first where there is no room for all."""
    line = [" "] * width
    for column, words in spots:
        at = max(0, min(width - len(words), column - len(words) // 2))
        if len(words) <= width and all(cell == " " for cell in line[max(0, at - 1) : at + len(words) + 1]):
            line[at : at + len(words)] = words
    return Text("".join(line), style=_MUTED)


def _fill(text: Text, width: int) -> Text:
    text.truncate(width, pad=True)
    return text
