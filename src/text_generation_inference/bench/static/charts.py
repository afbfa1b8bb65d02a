"""Charts in characters: a histogram of bars, and points over two axes joined by a line of braille dots.

Never torch. A chart is a list of lines of one width; `Drawn` makes it something that rich can lay out.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from text_generation_inference.bench.scale import short, tick_step

Block = list[Text]
Cell = tuple[str, str]  # a character and its style

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column
_MUTED = "bright_black"
_FULL_HEIGHT = 4  # runs in a bar of full height, at least: a single run is no tower
_COARSE, _FINE = (1.0, 2.0, 2.5, 5.0, 10.0), (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_DIGITS = 3


class Drawn:
    """A chart that fills the place it is given."""

    def __init__(self, draw: Callable[[int, int], Block]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._draw(options.max_width, options.height or options.max_height)


class NamedPoint(NamedTuple):
    x: float
    y: float
    name: str
    chosen: bool


def blank(width: int, height: int, words: str = "") -> Block:
    """Nothing, or a few words in the middle of it."""
    lines = [Text(" " * width) for _ in range(height)]
    if words and height > 0 and len(words) <= width:
        lines[(height - 1) // 2] = Text(words.center(width), style=_MUTED)
    return lines


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
    levels = [math.ceil(count / max(_FULL_HEIGHT, *counts) * rows * 8) for count in counts]
    lines: Block = []
    for row in range(rows - 1 + shows_counts, -1, -1):
        line = " " * margin
        for count, level in zip(counts, levels, strict=True):
            on_top = shows_counts and count > 0 and -(-level // 8) == row
            filled = _EIGHTHS[max(0, min(8, level - 8 * row))] * (bar - gap)
            line += (str(count).center(bar - gap) if on_top else filled) + " " * gap
        lines.append(Text(line.ljust(width)[:width], style=style))
    ends = [(0, low)] if high == low else [(0, low), (width, high)]
    if high > low and width >= 44:
        ends.append((width // 2, (low + high) / 2))
    return [*lines, _labels([(place, f"{short(value, _DIGITS)} {unit}") for place, value in ends], width)]


# -- points over two axes ------------------------------------------------------------------------------------------


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers that span from at most `low` to at least `high`, about `most` of them at most."""
    if not high > low:
        low, high = low - (abs(low) / 10 or 1.0), high + (abs(high) / 10 or 1.0)
    step = tick_step(low, high, max(1, most - 1), _FINE if most <= 3 else _COARSE)
    return [number * step for number in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


class _Axis:
    """A range of numbers and the round ones to name in it."""

    def __init__(self, values: Sequence[float], zoom: bool, most: int) -> None:
        low, high = min(values), max(values)
        self.ticks = ticks(low if zoom else 0.0, high, most)
        self.low, self.high = self.ticks[0], self.ticks[-1]
        if zoom:
            margin = (high - low) / 20 or abs(high) / 10 or 1.0
            self.low, self.high = low - margin, high + margin
            inside = [tick for tick in self.ticks if self.low <= tick <= self.high]
            self.ticks = inside if len(inside) > 1 else [self.low, self.high]

    def place(self, value: float, num_places: int) -> int:
        share = (value - self.low) / (self.high - self.low)
        return max(0, min(num_places - 1, round(share * (num_places - 1))))

    def named_places(self, num_places: int) -> dict[int, str]:
        return {self.place(tick, num_places): short(tick, _DIGITS) for tick in self.ticks}


def scatter(points: Sequence[NamedPoint], width: int, height: int, style: str, zoom: bool, x_unit: str) -> Block:
    """Points with their names, joined in their order. `zoom`: the axes cover the points only, not zero."""
    if not points or height < 3 or width < 24:
        return blank(width, height, "" if points else "no batch size is done yet")
    num_rows = height - 2
    y_axis = _Axis([point.y for point in points], zoom, max(2, min(6, num_rows // 3 + 1)))
    left = max(len(name) for name in y_axis.named_places(num_rows).values()) + 1
    num_columns = width - left - 1
    x_axis = _Axis([point.x for point in points], zoom, max(2, min(8, num_columns // 12 + 1)))

    across, down = 2 * num_columns, 4 * num_rows  # dots, two across and four down in each character
    places = [(x_axis.place(point.x, across), down - 1 - y_axis.place(point.y, down)) for point in points]
    rows = _join_places(places, num_columns, num_rows, f"dim {style}")
    for point, place in sorted(zip(points, places, strict=True), key=lambda pair: pair[0].chosen):
        _mark(rows, point, place[0] // 2, place[1] // 4, style)

    names = {num_rows - 1 - place: name for place, name in y_axis.named_places(num_rows).items()}
    lines: Block = []
    for number, row in enumerate(rows):
        line = Text(names.get(number, "").rjust(left - 1) + (" ┤" if number in names else " │"), style=_MUTED)
        for look, run in groupby(row, key=lambda cell: cell[1]):
            line.append("".join(character for character, _ in run), style=look)
        lines.append(line)
    names = x_axis.named_places(num_columns)
    floor = "".join("┬" if column in names else "─" for column in range(num_columns))
    lines.append(Text(" " * left + "└" + floor, style=_MUTED))
    spots = [(left + 1 + column, name) for column, name in names.items()]
    spots[-1] = (spots[-1][0], f"{spots[-1][1]} {x_unit}")
    return [*lines, _labels([spots[0], spots[-1], *spots[1:-1]], width)]


def _join_places(places: Sequence[tuple[int, int]], num_columns: int, num_rows: int, style: str) -> list[list[Cell]]:
    """Rows of characters with a line of dots from each place to the next."""
    dots = [[0] * num_columns for _ in range(num_rows)]
    for (x0, y0), (x1, y1) in pairwise(places):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for number in range(steps + 1):
            across, down = round(x0 + number / steps * (x1 - x0)), round(y0 + number / steps * (y1 - y0))
            dots[down // 4][across // 2] |= _DOTS[down % 4][across % 2]
    return [[(chr(_BRAILLE + dot) if dot else " ", style) for dot in row] for row in dots]


def _mark(rows: list[list[Cell]], point: NamedPoint, column: int, row: int, style: str) -> None:
    """A mark, and beside it the point's name where nothing is written, else where only the line is."""
    look = "bold white" if point.chosen else f"bold {style}"
    rows[row][column] = ("◆" if point.chosen else "●", look)
    right, left = column + 2, column - 1 - len(point.name)
    sides = ((row, right), (row + 1, right), (row - 1, left), (row, left), (row - 1, right), (row + 1, left))
    for only_blank in (True, False):
        for line, at in sides:
            end = at + len(point.name)
            if not (0 <= line < len(rows) and at >= 0 and end <= len(rows[line])):
                continue
            covered = [character for character, _ in rows[line][at:end]]
            touches = any(character.isalnum() for character, _ in rows[line][max(0, at - 1) : end + 1])
            if not touches and all(
                c == " " or (not only_blank and _BRAILLE <= ord(c) < _BRAILLE + 256) for c in covered
            ):
                rows[line][at:end] = [(character, look) for character in point.name]
                return


def _labels(spots: list[tuple[int, str]], width: int) -> Text:
    """Words centred on their columns, kept inside; the first ones go first where there is no room for all."""
    line = [" "] * width
    for column, words in spots:
        at = max(0, min(width - len(words), column - len(words) // 2))
        if len(words) <= width and all(cell == " " for cell in line[max(0, at - 1) : at + len(words) + 1]):
            line[at : at + len(words)] = words
    return Text("".join(line), style=_MUTED)
