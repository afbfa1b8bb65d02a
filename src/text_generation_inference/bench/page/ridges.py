"""Distributions above each other on one axis, one for each phase of a run.

A ridge is as high as its fullest part; its area says nothing about other ridges.
"""

import msgspec

from text_generation_inference.bench.page import frame
from text_generation_inference.bench.page.frame import BOTTOM, RIGHT, WIDTH
from text_generation_inference.bench.page.markup import Markup, tag
from text_generation_inference.bench.page.scale import Scale, axis, number
from text_generation_inference.bench.serve.results import Histogram, Spread

_HEAD, _RIDGE = 19.0, 24.0
_LEFT = 4.0
_MS_UP_TO = 5000.0
_LOG_FROM = 8.0


class Ridge(msgspec.Struct, frozen=True):
    label: str
    histogram: Histogram
    spread: Spread | None


def ridge_chart(title: str, note: str, slot: int, ridges: list[Ridge]) -> Markup | None:
    """None if nothing was counted."""
    ridges = [ridge for ridge in ridges if filled(ridge.histogram)]
    if not ridges:
        return None
    edges = [edge for ridge in ridges for low, high, _ in filled(ridge.histogram) for edge in (low, high)]
    seconds = max(edges) > _MS_UP_TO
    factor, unit = (1e-3, "s") if seconds else (1.0, "ms")
    places = [edge * factor for edge in edges if edge > 0]
    x = axis(places, _LEFT, WIDTH - RIGHT, log=bool(places) and max(places) > _LOG_FROM * min(places))
    marks: list[Markup] = []
    bottom = len(ridges) * (_HEAD + _RIDGE) + 4
    for tick in x.ticks():
        marks.append(frame.line(x(tick), 0.0, x(tick), bottom, "grid"))
    top = 0.0
    for ridge in ridges:
        marks.append(_draw(ridge, x, top, factor))
        top += _HEAD + _RIDGE
    marks += frame.x_axis(x, unit + (", log scale" if x.log else ""), bottom)
    described = ". ".join(_describe(ridge) for ridge in ridges)
    group = tag("g", marks, class_=f"run {frame.colour(slot)}", data_run=slot + 1)
    return frame.figure(title, note, frame.drawing(title, described, [group], bottom + BOTTOM))


def filled(histogram: Histogram) -> list[tuple[float, float, int]]:
    """(low edge, high edge, count) of what is not empty, in milliseconds."""
    bins = zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    return [(low, high, count) for low, high, count in bins if count > 0 and high > low]


def _draw(ridge: Ridge, x: Scale, top: float, factor: float) -> Markup:
    base = top + _HEAD + _RIDGE
    boxes: list[tuple[float, float, float]] = []
    for low, high, count in filled(ridge.histogram):
        left, right = x(low * factor), x(high * factor)
        boxes.append((left, max(right, left + 0.8), count / max(right - left, 0.8)))
    tallest = max(density for _, _, density in boxes)
    parts = [frame.label(_LEFT, top + 14, ridge.label, "row")]
    for left, right, density in boxes:
        height = max(0.8, _RIDGE * density / tallest)
        parts.append(tag("rect", x=left, y=base - height, width=right - left + 0.2, height=height, class_="ridge"))
    parts.append(frame.line(_LEFT, base, WIDTH - RIGHT, base, "grid"))
    spread = ridge.spread
    if spread is not None:
        for value, kind in ((spread.p50, "median"), (spread.p99, "tail")):
            parts.append(frame.line(x(value * factor), base - _RIDGE, x(value * factor), base, kind))
        parts.append(frame.label(WIDTH - RIGHT, top + 14, _percentiles(spread), "value right"))
    touched = tag("rect", x=0.0, y=top, width=WIDTH, height=_HEAD + _RIDGE, class_="touch", data_tip=_describe(ridge))
    return tag("g", parts, touched)


def _percentiles(spread: Spread) -> str:
    return f"p50 {number(spread.p50, 1)} · p99 {number(spread.p99, 1)} ms"


def _describe(ridge: Ridge) -> str:
    count = f"{sum(ridge.histogram.counts):,} values"
    return f"{ridge.label}: {count}" + (f", {_percentiles(ridge.spread)}" if ridge.spread else "")
