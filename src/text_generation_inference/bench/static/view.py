"""What the screen shows: the state as lines of an exact width and height.

Never torch. Knows no terminal: the same lines can be drawn anywhere.
"""

from dataclasses import dataclass

from rich.text import Text

from text_generation_inference.bench.static.charts import Block, Point, blank, histogram, scatter
from text_generation_inference.bench.static.display import clock
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


def draw(state: State, look: Look, width: int, height: int) -> Block:
    """Exactly `height` lines of exactly `width` cells. What does not fit is left out, the charts first."""
    tab = state.current if look.follows else look.tab
    batch = state.batches[tab]
    lines = [_title(state, width), _tabs(state, tab, width), *_gauges(state, width)]
    footer = [_footer(state, batch, width)]
    room = height - len(lines) - len(footer)
    if room >= 4:
        figures = _figures(batch, width) if room >= 7 and width >= 80 else _few_figures(batch, width)
        lines += figures
        room -= len(figures)
        bars = room if room < 11 else max(5, min(room * 2 // 5, 16))
        if bars >= 4 and width >= 50:
            lines += _histograms(batch, width, bars)
            lines += _scatters(state, tab, look.zoom, width, room - bars) if room > bars else []
    lines = lines[: max(0, height - 1)]
    lines += blank(width, height - len(lines) - 1) + footer
    return [_exactly(line, width) for line in lines[-height:]]


# -- head and foot -------------------------------------------------------------------------------------------------


def _title(state: State, width: int) -> Text:
    task = state.task
    rest = f" | Sequence Length: {task.sequence_length} | Decode Length: {task.decode_length}"
    about = f"{state.about} " if state.about else ""
    model = Text(task.model)
    model.truncate(max(8, width - len(rest) - len(about) - 10), overflow="ellipsis")
    line = Text(" Model: ", style="bold").append_text(model).append(rest)
    padding = width - line.cell_len - len(about)
    if padding >= 1:
        line.append(" " * padding + about, style="default")
    line.stylize("bold white on blue")
    return line


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
    line = Text(" Batch Size ", style="bold")
    line.append("‹ " if start > 0 else "  ", style=_MUTED)
    for index in range(start, end):
        if index > start:
            line.append("│", style=_MUTED)
        done = index < state.num_finished
        at_work = index == state.current and not state.finished
        style = _DONE if done else _ACCENT if at_work else _MUTED
        mark = "✓" if done else "●" if at_work else " "
        line.append(f"{names[index]}{mark}", style=f"{style} reverse" if index == tab else style)
    line.append(" ›" if end < len(names) else "", style=_MUTED)
    return line


def _gauges(state: State, width: int) -> Block:
    done = f"{state.num_finished} / {len(state.batches)}"
    if state.warming_up:
        rounds = f"warm-up {state.rounds + 1} / {state.task.warmups}"
    else:
        rounds = f"{state.task.runs if state.finished else state.rounds - state.task.warmups} / {state.task.runs}"
    return [
        _gauge("Total Progress", state.total_share, done, state.total_seconds_left(), width, "yellow"),
        _gauge("Batch Progress", state.batch_share, rounds, state.batch_seconds_left(), width, "green"),
    ]


def _gauge(name: str, share: float, amount: str, left: float | None, width: int, style: str) -> Text:
    rest = "" if left is None else "done" if share >= 1 else f"{clock(left)} left"
    tail = f" {share:>4.0%}  {amount:>13}  {rest:>12} " if width >= 60 else f" {share:>4.0%} {rest:>10} "
    line = Text(f" {name} ", style="bold")
    room = max(0, width - line.cell_len - len(tail))
    halves = round(share * 2 * room)
    line.append("━" * (halves // 2) + ("╸" if halves % 2 else ""), style=style)
    line.append("━" * (room - halves // 2 - halves % 2), style=_MUTED)
    line.append(tail)
    return line


def _footer(state: State, batch: BatchResult, width: int) -> Text:
    line = Text(" ")
    for keys, meaning in _KEYS:
        line.append(keys, style="bold").append(f" {meaning}   ", style=_MUTED)
    if state.finished:
        words, style = "finished: q prints the tables ", _DONE
    elif batch.prefill_steps > 1:
        words, style = f"prefill in {batch.prefill_steps} steps ", _ACCENT
    else:
        words, style = f"batch size {state.batches[state.current].batch_size} is measured ", _MUTED
    padding = width - line.cell_len - len(words)
    if padding >= 0:
        line.append(" " * padding + words, style=style)
    return line


# -- figures -------------------------------------------------------------------------------------------------------


def _figures(batch: BatchResult, width: int) -> Block:
    """A line of names and six of figures, prefill to the left and decode to the right."""
    left = (width - _GAP) * 2 // 5
    prefill = [("Prefill", batch.prefill_ms, " ms"), ("tokens/secs", batch.prefill_tokens_per_s, "")]
    decode = [
        ("Decode Total", batch.decode_total_ms, " ms"),
        ("Decode Token", batch.decode_token_ms, " ms"),
        ("tokens/secs", batch.decode_tokens_per_s, ""),
    ]
    return _beside(_columns(prefill, left, PREFILL), _columns(decode, width - _GAP - left, DECODE))


def _columns(columns: list[tuple[str, list[float], str]], width: int, style: str) -> Block:
    """Latencies have all six figures, throughputs (which have no unit here) the first three."""
    label = 7
    each = min(22, (width - label) // len(columns))
    head = Text("─" * label, style=_MUTED)
    for name, _, _ in columns:
        fill = each - len(name) - 1
        head.append((" " if head.cell_len > label else "─") + "─" * (fill - 1) if fill else "")
        head.append(f" {name}", style=f"bold {style}")
    head.append(" " + "─" * max(0, width - head.cell_len - 1))
    _exactly(head, width)
    lines = [head]
    summaries = [summarise(values) for _, values, _ in columns]
    for row, figure in enumerate(_FIGURES):
        line = Text(figure.ljust(label), style=_MUTED)
        for (_, values, unit), summary in zip(columns, summaries, strict=True):
            shown = f"{getattr(summary, figure.lower()):.2f}{unit}" if values else "-"
            line.append((shown if unit or row < 3 else "").rjust(each), style="bold" if row == 0 else "")
        lines.append(_exactly(line, width))
    return lines


def _few_figures(batch: BatchResult, width: int) -> Block:
    """Where there is room for little."""
    shown = [
        ("Prefill", batch.prefill_ms, "ms", PREFILL),
        ("Decode Token", batch.decode_token_ms, "ms", DECODE),
        ("Prefill", batch.prefill_tokens_per_s, "tokens/secs", PREFILL),
        ("Decode", batch.decode_tokens_per_s, "tokens/secs", DECODE),
    ]
    return [
        Text(f" {name:<13}", style=style).append(f"{summarise(values).average:.2f} {unit}" if values else "-")
        for name, values, unit, style in shown
    ]


# -- charts --------------------------------------------------------------------------------------------------------


def _histograms(batch: BatchResult, width: int, height: int) -> Block:
    left = (width - _GAP) // 2
    right = width - _GAP - left
    return _beside(
        [_heading("Prefill latency", left, PREFILL), *histogram(batch.prefill_ms, left, height - 1, PREFILL)],
        [_heading("Decode Token latency", right, DECODE), *histogram(batch.decode_token_ms, right, height - 1, DECODE)],
    )


def _scatters(state: State, tab: int, zoom: bool, width: int, height: int) -> Block:
    left = (width - _GAP) // 2
    right = width - _GAP - left
    prefill, decode = _points(state, tab)
    return _beside(
        [
            _heading("Prefill throughput over latency", left, PREFILL, "tokens/secs"),
            *scatter(prefill, left, height - 1, PREFILL, zoom, "ms"),
        ],
        [
            _heading("Decode throughput over latency", right, DECODE, "tokens/secs"),
            *scatter(decode, right, height - 1, DECODE, zoom, "ms"),
        ],
    )


def _points(state: State, tab: int) -> tuple[list[Point], list[Point]]:
    """Averages of each batch size that is done."""
    prefill: list[Point] = []
    decode: list[Point] = []
    for index, batch in enumerate(state.batches[: state.num_finished]):
        for points, latencies, throughputs in (
            (prefill, batch.prefill_ms, batch.prefill_tokens_per_s),
            (decode, batch.decode_token_ms, batch.decode_tokens_per_s),
        ):
            if latencies:
                x, y = summarise(latencies).average, summarise(throughputs).average
                points.append(Point(x, y, str(batch.batch_size), index == tab))
    return prefill, decode


# -- parts ---------------------------------------------------------------------------------------------------------


def _heading(words: str, width: int, style: str, unit: str = "") -> Text:
    line = Text("─ ", style=_MUTED).append(words, style=f"bold {style}")
    if unit and line.cell_len + len(unit) + 3 <= width:
        line.append(f" ({unit})", style=_MUTED)
    return _exactly(line.append(" " + "─" * max(0, width - line.cell_len - 1), style=_MUTED), width)


def _beside(left: Block, right: Block) -> Block:
    return [one.append(" " * _GAP).append_text(other) for one, other in zip(left, right, strict=True)]


def _exactly(line: Text, width: int) -> Text:
    line.truncate(width, overflow="crop", pad=True)
    return line
