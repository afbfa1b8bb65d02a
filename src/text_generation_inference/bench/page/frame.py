"""What all charts share: the figure around the drawing, axes, and marks that say their value when touched.

Standard library only. Drawings are 420 wide, so that their text can be read at the width of a phone; colours
come from classes (`s1` to `s8`, one for each run).
"""

import zlib
from collections.abc import Iterable

from text_generation_inference.bench.page.markup import Markup, join, tag
from text_generation_inference.bench.page.scale import Scale, short, thin

WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 14.0, 10.0, 36.0
NUM_COLOURS = 8
_LABEL_WIDTH = 34.0


def colour(slot: int) -> str:
    """The class of a run's marks; after the last colour, the first ones again, dashed."""
    return f"s{slot % NUM_COLOURS + 1}" + (" again" if slot >= NUM_COLOURS else "")


def figure(title: str, note: str, drawing: Markup) -> Markup:
    return tag("figure", tag("figcaption", tag("b", title), " ", tag("span", note)), drawing)


def drawing(title: str, description: str, marks: Iterable[str], height: float = HEIGHT) -> Markup:
    body = join(marks)
    name = f"c{zlib.crc32((title + description + body).encode()):08x}"
    return tag(
        "svg",
        tag("title", title, id=f"{name}t"),
        tag("desc", description, id=f"{name}d"),
        body,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{name}t",
        aria_describedby=f"{name}d",
    )


def y_axis(scale: Scale) -> list[Markup]:
    marks: list[Markup] = []
    for tick in scale.ticks():
        y = scale(tick)
        kind = "base" if tick == scale.low else "grid"
        marks.append(line(LEFT, y, WIDTH - RIGHT, y, kind))
        marks.append(label(LEFT - 6, y + 4, short(tick), "tick right"))
    return marks


def x_axis(scale: Scale, name: str, bottom: float, ticks: list[float] | None = None) -> list[Markup]:
    ticks = scale.ticks() if ticks is None else ticks
    places = [scale(tick) for tick in ticks]
    marks = [line(scale.start, bottom, scale.end, bottom, "base")]
    for number in thin(places, _LABEL_WIDTH):
        marks.append(line(places[number], bottom, places[number], bottom + 4, "base"))
        marks.append(label(places[number], bottom + 16, short(ticks[number]), "tick middle"))
    return [*marks, label(WIDTH - RIGHT, bottom + 31, name, "name right")]


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def label(x: float, y: float, text: str, kind: str) -> Markup:
    return tag("text", text, x=x, y=y, class_=kind)


def path(places: Iterable[tuple[float, float]], kind: str, closed: bool = False) -> Markup:
    steps = "L".join(f"{x:.2f} {y:.2f}" for x, y in places)
    return tag("path", d=f"M{steps}{'Z' if closed else ''}", class_=kind)


def mark(x: float, y: float, slot: int, hollow: bool = False) -> Markup:
    """Its shape says the run too, for those who do not see the colour."""
    kind = "mark hollow" if hollow else "mark"
    match slot % 4:
        case 0:
            return tag("circle", cx=x, cy=y, r=3.6, class_=kind)
        case 1:
            return tag("rect", x=x - 3.3, y=y - 3.3, width=6.6, height=6.6, class_=kind)
        case 2:
            return path([(x, y - 4.6), (x + 4.3, y + 3.2), (x - 4.3, y + 3.2)], kind, closed=True)
        case _:
            return path([(x, y - 4.8), (x + 4.8, y), (x, y + 4.8), (x - 4.8, y)], kind, closed=True)


def touch(x: float, y: float, text: str) -> Markup:
    """The place around a mark that shows its value."""
    return tag("circle", cx=x, cy=y, r=11.0, class_="touch", data_tip=text)


def legend(names: list[tuple[int, str]]) -> Markup:
    """Buttons that hide and show a run in all charts of their section."""
    items = [
        tag(
            "button",
            tag("svg", mark(8.0, 8.0, slot), viewBox="0 0 16 16", class_="key", aria_hidden="true"),
            tag("span", name),
            type="button",
            class_=colour(slot),
            aria_pressed="true",
            data_run=slot + 1,
        )
        for slot, name in names
    ]
    return tag("div", items, class_="legend", role="group", aria_label="Runs in the charts")
