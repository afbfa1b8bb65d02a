"""What the screen shows of the state, laid out by rich.

Never torch. Knows no terminal: the same layout can be drawn anywhere.
"""

from dataclasses import dataclass
from functools import partial

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from text_generation_inference.bench.row_progress import describe_seconds
from text_generation_inference.bench.static.charts import Drawn, NamedPoint, histogram, scatter
from text_generation_inference.bench.static.results import BatchResult, summarise
from text_generation_inference.bench.static.state import State

PREFILL, DECODE = "cyan", "magenta"
_ACCENT, _MUTED, _DONE = "bold yellow", "bright_black", "green"
_GAP = 2
_FIGURES = ("Average", "Lowest", "Highest", "p50", "p90", "p99")
_KEYS = (("→ tab ←", "batch size"), ("+ -", "zoom"), ("q", "quit"))


@dataclass
class Look:
    """What the user chose to see."""

    tab: int = 0
    follows: bool = True  # the tab is that of the batch size at work, until a key moves it
    zoom: bool = False

    def press(self, key: str, num_tabs: int) -> bool:
        """True if it changes anything."""
        before = (self.tab, self.zoom)
        if key in ("right", "left"):
            self.tab = (self.tab + (1 if key == "right" else -1)) % num_tabs
            self.follows = False
        elif key in ("+", "-"):
            self.zoom = key == "+"
        return before != (self.tab, self.zoom)


def draw(state: State, look: Look, width: int, height: int) -> Layout:
    """What does not fit is left out, the charts first."""
    tab = state.current if look.follows else look.tab
    batch = state.batches[tab]
    parts: list[tuple[RenderableType, int]] = [
        (_title(state, width), 1),
        (_tabs(state, tab, width), 1),
        (_gauges(state, width), 2),
    ]
    room = height - 5
    if room >= 4:
        figures = (_figures(batch), 7) if room >= 7 and width >= 80 else (_few_figures(batch), 4)
        parts.append(figures)
        room -= figures[1]
        bars = room if room < 11 else max(5, min(room * 2 // 5, 16))
        if bars >= 4 and width >= 50:
            parts.append((_histograms(batch), bars))
            parts += [(_scatters(state, tab, look.zoom, width), room - bars)] if room > bars else []
    kept: list[tuple[RenderableType, int]] = []
    left = height - 1
    for part, size in [*parts, (Text(" "), height)]:  # the last fills what is left
        if min(size, left) > 0:
            kept.append((part, min(size, left)))
            left -= min(size, left)
    layout = Layout()
    layout.split_column(*(Layout(part, size=size) for part, size in [*kept, (_footer(state, batch), 1)]))
    return layout


# -- head and foot -------------------------------------------------------------------------------------------------


def _line(left: Text, right: Text, style: str = "") -> Table:
    """One line with words at both ends."""
    grid = Table.grid(expand=True)
    grid.style = style
    grid.add_column(ratio=1, no_wrap=True, overflow="crop")
    grid.add_column(no_wrap=True, overflow="crop", justify="right")
    grid.add_row(left, right)
    return grid


def _title(state: State, width: int) -> Table:
    task = state.task
    rest = f" | Sequence Length: {task.sequence_length} | Decode Length: {task.decode_length}"
    model = Text(task.model)
    model.truncate(max(8, width - len(rest) - len(state.about) - 11), overflow="ellipsis")
    return _line(Text(" Model: ").append_text(model).append(rest), Text(f"{state.about} "), "bold white on blue")


def _tabs(state: State, tab: int, width: int) -> Text:
    """One tab for each batch size; where they are too many, those around the chosen one."""
    names = [f" {batch.batch_size} " for batch in state.batches]
    start, end = tab, tab + 1
    room = width - len(" Batch Size ") - 4
    used = len(names[tab]) + 2
    while start > 0 or end < len(names):
        options = [index for index in (start - 1, end) if 0 <= index < len(names)]
        nearest = min(options, key=lambda index: (abs(index - tab), index))
        if used + len(names[nearest]) + 3 > room:
            break
        used += len(names[nearest]) + 3
        start, end = min(start, nearest), max(end, nearest + 1)
    line = Text(" Batch Size ", style="bold", no_wrap=True, overflow="crop")
    line.append("‹ " if start > 0 else "  ", style=_MUTED)
    for index in range(start, end):
        if index > start:
            line.append("│", style=_MUTED)
        done = index < state.num_finished
        at_work = index == state.current and not state.finished
        style = _DONE if done else _ACCENT if at_work else _MUTED
        mark = "✓" if done else "●" if at_work else " "
        line.append(f"{names[index]}{mark}", style=f"{style} reverse" if index == tab else style)
    return line.append(" ›" if end < len(names) else "", style=_MUTED)


def _gauges(state: State, width: int) -> Table:
    if state.warming_up:
        runs = f"warm-up {state.rounds + 1} / {state.task.warmups}"
    else:
        runs = f"{state.task.runs if state.finished else state.rounds - state.task.warmups} / {state.task.runs}"
    done = f"{state.num_finished} / {len(state.batches)}"
    grid = Table.grid(expand=True, padding=(0, 1))
    for ratio in (None, 1, None, None, None):
        grid.add_column(no_wrap=True, overflow="crop", ratio=ratio)
    for name, share, amount, left, style in (
        ("Total Progress", state.total_share, done, state.total_seconds_left(), "yellow"),
        ("Batch Progress", state.batch_share, runs, state.batch_seconds_left(), "green"),
    ):
        rest = "" if left is None else "done" if share >= 1 else f"{describe_seconds(left)} left"
        bar = ProgressBar(1.0, share, style=_MUTED, complete_style=style, finished_style=style)
        head = Text(f" {name}", style="bold")
        grid.add_row(head, bar, f"{share:>4.0%}", *((f"{amount:>13}", f"{rest:>12} ") if width >= 60 else ("", rest)))
    return grid


def _footer(state: State, batch: BatchResult) -> Table:
    keys = Text(" ")
    for key, meaning in _KEYS:
        keys.append(key, style="bold").append(f" {meaning}   ", style=_MUTED)
    if state.finished:
        words = Text("finished: q prints the tables ", style=_DONE)
    elif batch.prefill_steps > 1:
        words = Text(f"prefill in {batch.prefill_steps} steps ", style=_ACCENT)
    else:
        words = Text(f"batch size {state.batches[state.current].batch_size} is measured ", style=_MUTED)
    return _line(keys, words)


# -- figures -------------------------------------------------------------------------------------------------------


def _figures(batch: BatchResult) -> Layout:
    """A line of names and six of figures, prefill to the left and decode to the right."""
    prefill = _figure_table([("Prefill", batch.prefill_ms), ("tokens/secs", batch.prefill_tokens_per_s)], PREFILL)
    decode = _figure_table(
        [
            ("Decode Total", batch.decode_total_ms),
            ("Decode Token", batch.decode_token_ms),
            ("tokens/secs", batch.decode_tokens_per_s),
        ],
        DECODE,
    )
    return _beside(prefill, decode, ratios=(2, 3))


def _figure_table(columns: list[tuple[str, list[float]]], style: str) -> Table:
    """Latencies have all six figures, throughputs the first three."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False, header_style=f"bold {style}")
    table.add_column("", style=_MUTED, no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True, ratio=1)
    for row, figure in enumerate(_FIGURES):
        cells: list[str] = []
        for name, values in columns:
            rate = name == "tokens/secs"
            shown = f"{getattr(summarise(values), figure.lower()):.2f}{'' if rate else ' ms'}" if values else "-"
            cells.append("" if rate and row >= 3 else shown)
        table.add_row(figure, *cells, style="bold" if row == 0 else "")
    return table


def _few_figures(batch: BatchResult) -> Group:
    """Where there is room for little."""
    shown = [
        ("Prefill", batch.prefill_ms, "ms", PREFILL),
        ("Decode Token", batch.decode_token_ms, "ms", DECODE),
        ("Prefill", batch.prefill_tokens_per_s, "tokens/secs", PREFILL),
        ("Decode", batch.decode_tokens_per_s, "tokens/secs", DECODE),
    ]
    lines: list[Text] = []
    for name, values, unit, style in shown:
        line = Text(f" {name:<13}", style=style, no_wrap=True, overflow="crop")
        lines.append(line.append(f"{summarise(values).average:.2f} {unit}" if values else "-", style="default"))
    return Group(*lines)


# -- charts --------------------------------------------------------------------------------------------------------


def _histograms(batch: BatchResult) -> Layout:
    return _beside(
        _headed("Prefill latency", PREFILL, Drawn(partial(histogram, batch.prefill_ms, style=PREFILL))),
        _headed("Decode Token latency", DECODE, Drawn(partial(histogram, batch.decode_token_ms, style=DECODE))),
    )


def _scatters(state: State, tab: int, zoom: bool, width: int) -> Layout:
    """Averages of each batch size that is done."""
    prefill: list[NamedPoint] = []
    decode: list[NamedPoint] = []
    for index, batch in enumerate(state.batches[: state.num_finished]):
        for points, latencies, throughputs in (
            (prefill, batch.prefill_ms, batch.prefill_tokens_per_s),
            (decode, batch.decode_token_ms, batch.decode_tokens_per_s),
        ):
            if latencies:
                x, y = summarise(latencies).average, summarise(throughputs).average
                points.append(NamedPoint(x, y, str(batch.batch_size), index == tab))
    left, right = (
        _headed(
            f"{name} throughput over latency",
            style,
            Drawn(partial(scatter, points, style=style, zoom=zoom, x_unit="ms")),
            " (tokens/secs)" if width >= 96 else "",
        )
        for name, style, points in (("Prefill", PREFILL, prefill), ("Decode", DECODE, decode))
    )
    return _beside(left, right)


def _headed(words: str, style: str, chart: Drawn, unit: str = "") -> Layout:
    layout = Layout()
    title = Text(words, style=f"bold {style}").append(unit, style=_MUTED)
    layout.split_column(Layout(Rule(title, align="left", style=_MUTED), size=1), Layout(chart))
    return layout


def _beside(left: RenderableType, right: RenderableType, ratios: tuple[int, int] = (1, 1)) -> Layout:
    layout = Layout()
    layout.split_row(Layout(left, ratio=ratios[0]), Layout(Text(" "), size=_GAP), Layout(right, ratio=ratios[1]))
    return layout
