"""Charts of bars: rows of work with the least time they could take, and the parts of a whole.

Standard library only.
"""

import msgspec

from text_generation_inference.bench.page import frame
from text_generation_inference.bench.page.frame import WIDTH
from text_generation_inference.bench.page.markup import Markup, tag
from text_generation_inference.bench.page.scale import Scale, short

_START, _ROOM = 2.0, 104.0  # of the bars; to their right, for their value
_BAR, _GAP, _HEAD, _BETWEEN = 15.0, 4.0, 18.0, 10.0


class Bar(msgspec.Struct, frozen=True):
    slot: int
    name: str  # of the run
    value: float
    shown: str
    text: str
    floor: float | None = None
    published: float | None = None


class Group(msgspec.Struct, frozen=True):
    label: str
    bars: list[Bar]


def bar_chart(title: str, note: str, groups: list[Group]) -> Markup:
    bars = [bar for group in groups for bar in group.bars]
    most = max(value for bar in bars for value in (bar.value, bar.floor or 0.0, bar.published or 0.0, 1e-9))
    x = Scale(0.0, most, _START, WIDTH - _ROOM)
    marks: list[Markup] = []
    top = 0.0
    for group in groups:
        marks.append(frame.label(_START, top + 12, group.label, "row"))
        top += _HEAD
        for bar in group.bars:
            marks.append(_draw(bar, x, top))
            top += _BAR + _GAP
        top += _BETWEEN
    described = ". ".join(
        f"{group.label}: {', '.join(f'{bar.name} {bar.shown}' for bar in group.bars)}" for group in groups
    )
    return frame.figure(title, note, frame.drawing(title, described, marks, top))


def _draw(bar: Bar, x: Scale, top: float) -> Markup:
    end, parts = x(bar.value), []
    if bar.floor is not None:
        at = x(bar.floor)
        parts.append(tag("rect", x=_START, y=top, width=at - _START, height=_BAR, class_="room"))
    parts.append(tag("rect", x=_START, y=top, width=max(1.0, end - _START), height=_BAR, class_="bar"))
    if bar.floor is not None:
        at = x(bar.floor)
        parts.append(frame.line(at, top - 2, at, top + _BAR + 2, "floor"))
    last = max(end, x(bar.floor or 0.0))
    if bar.published is not None:
        at, middle = x(bar.published), top + _BAR / 2
        shape = [(at, middle - 6), (at + 6, middle), (at, middle + 6), (at - 6, middle)]
        parts.append(frame.path(shape, "published", closed=True))
        last = max(last, at + 6)
    parts.append(frame.label(last + 6, top + 12, bar.shown, "value"))
    touched = tag("rect", x=0.0, y=top - 2, width=WIDTH, height=_BAR + 4, class_="touch", data_tip=bar.text)
    return tag("g", parts, touched, class_=f"run {frame.colour(bar.slot)}", data_run=bar.slot + 1)


def parts_chart(title: str, note: str, unit: str, parts: list[tuple[int, str, float]]) -> Markup | None:
    """One bar of several parts (colour, name, value), each with its name and share below."""
    whole = sum(max(0.0, value) for _, _, value in parts)
    if whole <= 0:
        return None
    marks: list[Markup] = []
    at, top = _START, 34.0
    for slot, name, value in parts:
        width = (WIDTH - 2 * _START) * max(0.0, value) / whole
        told = f"{name}: {value:,.3f} {unit}, {value / whole:.1%}"
        kind = f"bar {frame.colour(slot)}"
        marks.append(tag("rect", x=at, y=4.0, width=max(0.5, width - 1), height=20.0, class_=kind, data_tip=told))
        marks.append(tag("rect", x=_START, y=top, width=9.0, height=9.0, class_=kind))
        marks.append(frame.label(_START + 15, top + 9, name, "row"))
        marks.append(frame.label(WIDTH - 62, top + 9, f"{value:,.3f} {unit}", "value right"))
        marks.append(frame.label(WIDTH - 2, top + 9, f"{value / whole:.1%}", "value right"))
        at += width
        top += 18
    described = ", ".join(f"{name} {short(value)} {unit}" for _, name, value in parts)
    return frame.figure(title, note, frame.drawing(title, described, marks, top + 4))
