"""The charts of the page: from values to places. What they look like is in `templates/charts.html` and the style.

Drawings are 420 wide, so that their text can be read at the width of a phone. Knows no reports.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from text_generation_inference.bench.results import Spread
from text_generation_inference.bench.scale import Scale, axis, short, thin
from text_generation_inference.bench.serve.results import LatencyHistogram

WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 14.0, 10.0, 36.0
_LABEL_WIDTH = 34.0
_MS_UP_TO = 5000.0  # from there on an axis is in seconds
_BAR_START, _BAR_ROOM = 2.0, 104.0  # to the left of bars; to their right, for their value
_BAR, _BAR_GAP, _GROUP_HEAD, _GROUP_GAP = 15.0, 4.0, 18.0, 10.0
_RIDGE_HEAD, _RIDGE, _RIDGE_LEFT, _RIDGE_LOG_FROM = 19.0, 24.0, 4.0, 8.0

Place = tuple[float, float]


class Tick(NamedTuple):
    at: float
    text: str


class XAxis(NamedTuple):
    start: float
    end: float
    bottom: float
    ticks: list[Tick]
    name: str


class Figure(msgspec.Struct, kw_only=True):
    """`kind` names the macro that draws `parts`. `described` is for those who do not see it."""

    kind: str
    title: str
    note: str
    label: str
    described: str
    height: float = HEIGHT
    parts: Any
    x_axis: XAxis | None = None
    ticks: list[Tick] = []


# -- one quantity against another ----------------------------------------------------------------------------------


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


def line_chart(
    title: str,
    note: str,
    x_name: str,
    lines: list[Line],
    *,
    y_unit: str = "",  # "ms": shown in seconds where that is shorter
    x_log: bool | None = False,
    y_log: bool | None = None,
    x_ticks: list[float] | None = None,
) -> Figure | None:
    """None if there is not a point to show."""
    points = [point for line in lines for point in (*line.points, *line.apart)]
    if not points:
        return None
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    factor, unit = (1e-3, "s") if y_unit == "ms" and max(values) > _MS_UP_TO else (1.0, y_unit)
    bottom = HEIGHT - BOTTOM
    y = axis([value * factor for value in values], bottom, TOP, y_log)
    x = axis([point.x for point in points], LEFT, WIDTH - RIGHT, x_log)

    def say(point: Point) -> str:
        return f"{short(point.y * factor)}{' ' + unit if unit else ''} at {short(point.x)} {x_name}"

    told: list[str] = []
    for line in lines:
        ordered = sorted((*line.points, *line.apart), key=lambda point: point.x)
        if ordered:
            told.append(f"{line.name}: {', '.join(say(point) for point in dict.fromkeys((ordered[0], ordered[-1])))}")
    return Figure(
        kind="lines",
        title=title,
        note=", ".join(part for part in (unit, "log scale" if y.log else "", note) if part),
        label=f"{title} against {x_name}",
        described=". ".join(told),
        parts=[_place_line(line, x, y, factor) for line in reversed(lines)],
        x_axis=_x_axis(x, x_name, bottom, x_ticks),
        ticks=[Tick(y(tick), short(tick)) for tick in y.ticks()],
    )


def _place_line(line: Line, x: Scale, y: Scale, factor: float) -> dict[str, Any]:
    def place(point: Point, value: float | None) -> Place:
        return x(point.x), y((point.y if value is None else value) * factor)

    points = sorted(line.points, key=lambda point: point.x)
    lows, highs = [place(point, point.low) for point in points], [place(point, point.high) for point in points]
    has_band = lows != highs and len(points) > 1
    ends = [(point, end) for point in line.apart for end in (point.low, point.high) if end is not None]
    whiskers = [(place(point, end), place(point, None)) for point, end in ends]
    if lows != highs and not has_band:
        whiskers.append((lows[0], highs[0]))
    marks = [(*place(point, None), hollow, point.text) for point, hollow in _with_hollow(points, line.apart)]
    return {
        "line": line,
        "band": _path([*lows, *reversed(highs)]) + "Z" if has_band else "",
        "path": _path(place(point, None) for point in points) if len(points) > 1 else "",
        "whiskers": whiskers,
        "marks": marks,
    }


def _with_hollow(points: list[Point], apart: list[Point]) -> list[tuple[Point, bool]]:
    return [*((point, False) for point in points), *((point, True) for point in apart)]


def _x_axis(scale: Scale, name: str, bottom: float, values: list[float] | None = None) -> XAxis:
    values = scale.ticks() if values is None else values
    places = [scale(value) for value in values]
    ticks = [Tick(places[number], short(values[number])) for number in thin(places, _LABEL_WIDTH)]
    return XAxis(scale.start, scale.end, bottom, ticks, name)


def _path(places: Iterable[Place]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in places)


# -- bars ----------------------------------------------------------------------------------------------------------


class Bar(msgspec.Struct, frozen=True):
    slot: int
    name: str  # of the run
    value: float
    shown: str
    text: str
    floor: float | None = None
    published: float | None = None


def bar_chart(title: str, note: str, groups: dict[str, list[Bar]]) -> Figure | None:
    """Rows of work, with their floor and what others published. None if there is no bar."""
    if not groups:
        return None
    bars = [bar for group in groups.values() for bar in group]
    most = max(value for bar in bars for value in (bar.value, bar.floor or 0.0, bar.published or 0.0, 1e-9))
    x = Scale(0.0, most, _BAR_START, WIDTH - _BAR_ROOM)
    parts: list[dict[str, Any]] = []
    top = 0.0
    for label, group in groups.items():
        placed = [
            _place_bar(bar, x, top + _GROUP_HEAD + number * (_BAR + _BAR_GAP)) for number, bar in enumerate(group)
        ]
        parts.append({"label": label, "top": top, "bars": placed})
        top += _GROUP_HEAD + len(group) * (_BAR + _BAR_GAP) + _GROUP_GAP
    told = [f"{label}: {', '.join(f'{bar.name} {bar.shown}' for bar in group)}" for label, group in groups.items()]
    return Figure(kind="bars", title=title, note=note, label=title, described=". ".join(told), height=top, parts=parts)


def _place_bar(bar: Bar, x: Scale, top: float) -> dict[str, Any]:
    end, floor = x(bar.value), None if bar.floor is None else x(bar.floor)
    diamond, last = "", max(end, x(bar.floor or 0.0))
    if bar.published is not None:
        at, middle = x(bar.published), top + _BAR / 2
        diamond = _path([(at, middle - 6), (at + 6, middle), (at, middle + 6), (at - 6, middle)]) + "Z"
        last = max(last, at + 6)
    width = max(1.0, end - _BAR_START)
    return {"bar": bar, "top": top, "width": width, "floor": floor, "diamond": diamond, "label_at": last + 6}


def parts_chart(title: str, note: str, unit: str, parts: list[tuple[int, str, float]]) -> Figure | None:
    """One bar of several parts (colour, name, value), each with its name and share below."""
    whole = sum(max(0.0, value) for _, _, value in parts)
    if whole <= 0:
        return None
    placed: list[dict[str, Any]] = []
    at = _BAR_START
    for number, (slot, name, value) in enumerate(parts):
        width = (WIDTH - 2 * _BAR_START) * max(0.0, value) / whole
        figures = f"{value:,.3f} {unit}", f"{value / whole:.1%}"
        drawn = {"slot": slot, "name": name, "at": at, "width": max(0.5, width - 1), "top": 34.0 + 18 * number}
        placed.append({**drawn, "value": figures[0], "share": figures[1]})
        at += width
    described = ", ".join(f"{name} {short(value)} {unit}" for _, name, value in parts)
    height = 38.0 + 18 * len(parts)
    return Figure(kind="shares", title=title, note=note, label=title, described=described, height=height, parts=placed)


# -- distributions -------------------------------------------------------------------------------------------------


class Ridge(msgspec.Struct, frozen=True):
    label: str
    histogram: LatencyHistogram
    spread: Spread | None

    @property
    def percentiles(self) -> str:
        return f"p50 {self.spread.p50:,.1f} · p99 {self.spread.p99:,.1f} ms" if self.spread else ""

    @property
    def described(self) -> str:
        count = f"{sum(self.histogram.counts):,} values"
        return f"{self.label}: {count}" + (f", {self.percentiles}" if self.spread else "")


def ridge_chart(title: str, note: str, slot: int, ridges: list[Ridge]) -> Figure | None:
    """Distributions above each other on one axis, each as high as its fullest part. None if nothing was counted."""
    ridges = [ridge for ridge in ridges if filled(ridge.histogram)]
    if not ridges:
        return None
    edges = [edge for ridge in ridges for low, high, _ in filled(ridge.histogram) for edge in (low, high)]
    factor, unit = (1e-3, "s") if max(edges) > _MS_UP_TO else (1.0, "ms")
    places = [edge * factor for edge in edges if edge > 0]
    x = axis(places, _RIDGE_LEFT, WIDTH - RIGHT, bool(places) and max(places) > _RIDGE_LOG_FROM * min(places))
    each = _RIDGE_HEAD + _RIDGE
    bottom = len(ridges) * each + 4
    return Figure(
        kind="ridges",
        title=title,
        note=note,
        label=title,
        described=". ".join(ridge.described for ridge in ridges),
        height=bottom + BOTTOM,
        parts={"slot": slot, "ridges": [_place_ridge(ridge, x, at * each, factor) for at, ridge in enumerate(ridges)]},
        x_axis=_x_axis(x, unit + (", log scale" if x.log else ""), bottom),
        ticks=[Tick(x(tick), "") for tick in x.ticks()],
    )


def filled(histogram: LatencyHistogram) -> list[tuple[float, float, int]]:
    """(low edge, high edge, count) of what is not empty, in milliseconds."""
    bins = zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    return [(low, high, count) for low, high, count in bins if count > 0 and high > low]


def _place_ridge(ridge: Ridge, x: Scale, top: float, factor: float) -> dict[str, Any]:
    boxes: list[tuple[float, float, float]] = []
    for low, high, count in filled(ridge.histogram):
        left, right = x(low * factor), x(high * factor)
        boxes.append((left, max(right - left, 0.8), count / max(right - left, 0.8)))
    tallest = max(density for _, _, density in boxes)
    return {
        "ridge": ridge,
        "top": top,
        "base": top + _RIDGE_HEAD + _RIDGE,
        "boxes": [(left, width + 0.2, max(0.8, _RIDGE * density / tallest)) for left, width, density in boxes],
        "median": x(ridge.spread.p50 * factor) if ridge.spread else None,
        "tail": x(ridge.spread.p99 * factor) if ridge.spread else None,
    }
