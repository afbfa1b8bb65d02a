"""Charts of one quantity against another, a line for each run.

Standard library only.
"""

import msgspec

from text_generation_inference.bench.page import frame
from text_generation_inference.bench.page.frame import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from text_generation_inference.bench.page.markup import Markup, tag
from text_generation_inference.bench.page.scale import Scale, axis, short

_MS_UP_TO = 5000.0  # from there on an axis is in seconds


class Point(msgspec.Struct, frozen=True):
    x: float
    y: float
    text: str = ""  # shown when touched
    low: float | None = None  # of the band around the line
    high: float | None = None


class Line(msgspec.Struct, frozen=True):
    name: str
    slot: int
    points: list[Point]  # joined from left to right
    apart: list[Point] = []  # hollow, not joined
    marked: bool = True


class Chart(msgspec.Struct, frozen=True):
    title: str
    note: str
    x_name: str
    lines: list[Line]
    y_unit: str = ""  # "ms": shown in seconds where that is shorter
    x_log: bool | None = False
    y_log: bool | None = None
    x_ticks: list[float] | None = None


def line_chart(chart: Chart) -> Markup | None:
    """None if there is not a point to show."""
    points = [point for line in chart.lines for point in (*line.points, *line.apart)]
    if not points:
        return None
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    in_seconds = chart.y_unit == "ms" and max(values) > _MS_UP_TO
    factor, unit = (1e-3, "s") if in_seconds else (1.0, chart.y_unit)
    bottom = HEIGHT - BOTTOM
    y = axis([value * factor for value in values], bottom, TOP, chart.y_log)
    x = axis([point.x for point in points], LEFT, WIDTH - RIGHT, chart.x_log)
    marks = [*frame.y_axis(y), *frame.x_axis(x, chart.x_name, bottom, chart.x_ticks)]
    for line in reversed(chart.lines):
        marks.append(_draw(line, x, y, factor))
    note = ", ".join(part for part in (unit, "log scale" if y.log else "", chart.note) if part)
    drawn = frame.drawing(f"{chart.title} against {chart.x_name}", _describe(chart, factor, unit), marks)
    return frame.figure(chart.title, note, drawn)


def _draw(line: Line, x: Scale, y: Scale, factor: float) -> Markup:
    points = sorted(line.points, key=lambda point: point.x)
    parts: list[Markup] = []
    lows = [(x(point.x), y((point.y if point.low is None else point.low) * factor)) for point in points]
    highs = [(x(point.x), y((point.y if point.high is None else point.high) * factor)) for point in points]
    if lows != highs and len(points) > 1:
        parts.append(frame.path([*lows, *reversed(highs)], "band", closed=True))
    elif lows != highs:
        parts.append(frame.line(*lows[0], *highs[0], kind="whisker"))
    if len(points) > 1:
        parts.append(frame.path([(x(point.x), y(point.y * factor)) for point in points], "line"))
    for point in line.apart:
        ends = [value for value in (point.low, point.high) if value is not None]
        parts += [frame.line(x(point.x), y(end * factor), x(point.x), y(point.y * factor), "whisker") for end in ends]
    for point, hollow in [*((p, False) for p in points), *((p, True) for p in line.apart)]:
        place = (x(point.x), y(point.y * factor))
        if line.marked:
            parts.append(frame.mark(*place, line.slot, hollow))
        if point.text:
            parts.append(frame.touch(*place, f"{line.name}\n{point.text}"))
    return tag("g", parts, class_=f"run {frame.colour(line.slot)}", data_run=line.slot + 1)


def _describe(chart: Chart, factor: float, unit: str) -> str:
    """In words, for those who do not see it; the tables have the figures."""

    def say(point: Point) -> str:
        return f"{short(point.y * factor)}{' ' + unit if unit else ''} at {short(point.x)} {chart.x_name}"

    told: list[str] = []
    for line in chart.lines:
        points = sorted((*line.points, *line.apart), key=lambda point: point.x)
        if points:
            told.append(f"{line.name}: {say(points[0])}" + (f", {say(points[-1])}" if len(points) > 1 else ""))
    return ". ".join(told)
