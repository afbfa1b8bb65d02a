"""Rows of work without a server on the page."""

from collections.abc import Callable

from text_generation_inference.bench.page.bars import Bar, Group, bar_chart, parts_chart
from text_generation_inference.bench.page.markup import Markup, tag
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.page.scale import number
from text_generation_inference.bench.page.tables import table
from text_generation_inference.bench.report import name_published, published_cell
from text_generation_inference.bench.results import OfflineReport, Row, RowResult, StepProfile

TERMS = (
    ("Output tokens/s", "iterations x requests x new tokens / seconds; reading the prompts is in the time"),
    ("Total tokens/s", "the same with the prompts' tokens counted"),
    ("Step", "median time from result to result while most requests decode; host: the planning thread's part of it"),
    ("Floor", "the least time the GPU's own libraries need for the matrix products and the cache's bytes"),
    ("Published", "what others reported for the same work on the hardware that is named; not measured here"),
)
_MOST_KERNELS = 12
_KINDS = ("products", "attention", "other", "copies")  # of kernels, each with a colour of its own
_GAPS = 7

Pairs = list[tuple[Run, OfflineReport]]


def draw(pairs: Pairs) -> list[tuple[str | None, list[Markup | None]]]:
    """Charts in groups, each with a heading if it needs one."""
    profiles = [_profile_chart(run, report.profile) for run, report in pairs if report.profile is not None]
    return [(None, [_throughput(pairs), _steps(pairs)]), ("One decode step taken apart", profiles)]


def _throughput(pairs: Pairs) -> Markup | None:
    groups = _grouped(pairs, lambda run, row: _throughput_bar(run, row))
    if not groups:
        return None
    rows = [row for _, report in pairs for row in report.rows]
    notes = ["output tokens/s"]
    if any(row.floor_tokens_per_s is not None for row in rows):
        notes.append("line: the floor")
    published = [row.published for row in rows if row.published is not None]
    if published:
        notes.append(f"diamond: {name_published(published)}")
    return bar_chart("Throughput", "; ".join(notes), groups)


def _throughput_bar(run: Run, row: RowResult) -> Bar:
    shown = f"{row.output_tokens_per_s:,.0f}"
    text = f"{run.name}\n{name_row(row)}\n{row.output_tokens_per_s:,.2f} tokens/s"
    if row.of_floor is not None:
        shown += f" · {row.of_floor:.0%}"
        text += f"\nfloor {row.floor_tokens_per_s or 0:,.2f}: {row.of_floor:.1%} of it"
    if row.published is not None:
        text += f"\n{name_published([row.published])}: {published_cell(row.published)}"
    published = row.published.output_tokens_per_s if row.published else None
    return Bar(run.slot, run.name, row.output_tokens_per_s, shown, text, row.floor_tokens_per_s, published)


def _steps(pairs: Pairs) -> Markup | None:
    def bar(run: Run, row: RowResult) -> Bar | None:
        if row.step_ms is None:
            return None
        text = f"{run.name}\n{name_row(row)}\n{row.step_ms:,.3f} ms per step of {row.step_rows:,} requests"
        return Bar(run.slot, run.name, row.step_ms, f"{row.step_ms:,.2f}", text, row.floor_step_ms)

    groups = _grouped(pairs, bar)
    with_floor = any(each.floor is not None for group in groups for each in group.bars)
    note = "ms, median" + ("; line: the floor" if with_floor else "")
    return bar_chart("Decode step", note, groups) if groups else None


def _grouped(pairs: Pairs, bar) -> list[Group]:  # noqa: ANN001 - a function of run and row
    """Bars by row of work, in the order in which the rows first appear."""
    bars: dict[str, list[Bar]] = {}
    for run, report in pairs:
        for row in report.rows:
            drawn = bar(run, row)
            if drawn is not None:
                bars.setdefault(name_row(row), []).append(drawn)
    return [Group(label, drawn) for label, drawn in bars.items()]


def name_row(row: RowResult) -> str:
    return str(Row(row.inputs, row.outputs, row.requests))


def _profile_chart(run: Run, profile: StepProfile) -> Markup | None:
    kinds = {kind: slot for slot, kind in enumerate(dict.fromkeys([*_KINDS, *profile.by_kind]))}
    parts = [(kinds[kind], kind, ms) for kind, ms in profile.by_kind.items()]
    parts.append((_GAPS, "gaps between kernels", profile.gap_ms))
    note = (
        f"{profile.wall_ms:.2f} ms from result to result; {profile.rows} requests at {profile.context:,} tokens, traced"
    )
    return parts_chart(run.name, note, "ms", parts)


# -- tables --------------------------------------------------------------------------------------------------------


def list_tables(run: Run, report: OfflineReport) -> list[Markup]:
    parts: list[Markup] = []
    if report.rows:
        parts.append(table(f"{run.name}: throughput", *throughput_cells(report.rows)))
        parts.append(table(f"{run.name}: steps, first tokens and memory", *step_cells(report.rows)))
    if report.skipped:
        texts = [f"{Row(row.inputs, row.outputs, row.requests)}: {row.reason}" for row in report.skipped]
        parts.append(tag("p", f"{run.name}: left out. {'; '.join(texts)}.", class_="warning"))
    if report.profile is not None:
        parts.append(_kernels(run, report.profile))
    return parts


def throughput_cells(rows: list[RowResult]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells."""
    published = name_published([row.published for row in rows if row.published is not None])
    return _columns(
        rows,
        [
            ("output tok/s", lambda row: number(row.output_tokens_per_s, 1)),
            (published, lambda row: published_cell(row.published) if row.published else None),
            ("floor tok/s", lambda row: _optional(row.floor_tokens_per_s, 1)),
            ("of floor", lambda row: None if row.of_floor is None else f"{row.of_floor:.1%}"),
            ("total tok/s", lambda row: number(row.total_tokens_per_s, 1)),
            ("iterations", lambda row: str(row.iterations)),
            ("seconds", lambda row: number(row.seconds, 2)),
        ],
    )


def step_cells(rows: list[RowResult]) -> tuple[list[str], list[list[str]]]:
    return _columns(
        rows,
        [
            ("step ms", lambda row: number(row.step_ms, 3)),
            ("floor step ms", lambda row: _optional(row.floor_step_ms, 3)),
            ("host ms", lambda row: number(row.host_ms, 3)),
            ("TTFT ms", lambda row: number(row.first_token_ms, 1)),
            ("TTFT max", lambda row: number(row.first_token_max_ms, 1)),
            ("steps", lambda row: f"{row.num_steps:,}"),
            ("preempted", lambda row: f"{row.num_preemptions:,}"),
            ("peak GB", lambda row: _optional(row.peak_memory_gb, 2)),
        ],
    )


Cell = Callable[[RowResult], str | None]


def _columns(rows: list[RowResult], columns: list[tuple[str, Cell]]) -> tuple[list[str], list[list[str]]]:
    """What no row has, has no column."""
    filled = [(head, cells) for head, cell in columns if any(cells := [cell(row) for row in rows])]
    heads = ["in/out x requests", *(head for head, _ in filled)]
    return heads, [[name_row(row), *(cells[at] or "–" for _, cells in filled)] for at, row in enumerate(rows)]


def _optional(value: float | None, digits: int) -> str | None:
    return None if value is None else number(value, digits)


def _kernels(run: Run, profile: StepProfile) -> Markup:
    whole = max(profile.wall_ms, 1e-9)
    cells = [
        [kernel.name[:160], kernel.kind, f"{kernel.ms:.4f}", f"{kernel.ms / whole:.1%}", f"{kernel.calls:g}"]
        for kernel in profile.kernels[:_MOST_KERNELS]
    ]
    caption = (
        f"{run.name}: kernels of a decode step that takes {profile.wall_ms:.3f} ms from result to result"
        f" ({profile.traced_ms:.3f} traced)"
    )
    return table(caption, ["kernel", "part", "ms", "of the step", "calls"], cells)
