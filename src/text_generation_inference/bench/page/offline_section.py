"""Rows of work without a server on the page."""

from collections.abc import Callable

from text_generation_inference.bench.offline_tables import kernels_table, name_published, page_tables, published_cell
from text_generation_inference.bench.page.charts import Bar, Figure, bar_chart, parts_chart
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.results import OfflineReport, RowResult, StepProfile
from text_generation_inference.bench.tables import Table

TERMS = {
    "Output tokens/s": "iterations x requests x new tokens / seconds; reading the prompts is in the time",
    "Total tokens/s": "the same with the prompts' tokens counted",
    "Step": "median time from result to result while most requests decode; host: the planning thread's part of it",
    "Floor": "the time the GPU's own libraries need for the matrix products and the cache's bytes alone",
    "Published": "what others reported for the same work on the hardware that is named; not measured here",
}
_KINDS = ("products", "attention", "other", "copies")  # of kernels, each with a colour of its own
_GAPS = 7

Pairs = list[tuple[Run, OfflineReport]]


def draw(pairs: Pairs) -> list[tuple[str | None, list[Figure | None]]]:
    """Charts in groups, each with a heading if it needs one."""
    profiles = [_profile_chart(run, profile) for run, report in pairs for profile in report.profiles]
    return [(None, [_throughput(pairs), _steps(pairs)]), ("Steps taken apart", profiles)]


def _throughput(pairs: Pairs) -> Figure | None:
    rows = [row for _, report in pairs for row in report.rows]
    notes = ["output tokens/s"]
    if any(row.floor_tokens_per_s is not None for row in rows):
        notes.append("line: the floor")
    published = [row.published for row in rows if row.published is not None]
    if published:
        notes.append(f"diamond: {name_published(published)}")
    return bar_chart("Throughput", "; ".join(notes), _grouped(pairs, _throughput_bar))


def _throughput_bar(run: Run, row: RowResult) -> Bar:
    shown = f"{row.output_tokens_per_s:,.0f}"
    text = f"{run.name}\n{row.row}\n{row.output_tokens_per_s:,.2f} tokens/s"
    if row.of_floor is not None:
        shown += f" · {row.of_floor:.0%}"
        text += f"\nfloor {row.floor_tokens_per_s or 0:,.2f}: {row.of_floor:.1%} of it"
    if row.published is not None:
        text += f"\n{name_published([row.published])}: {published_cell(row.published)}"
    published = row.published.output_tokens_per_s if row.published else None
    return Bar(run.slot, run.name, row.output_tokens_per_s, shown, text, row.floor_tokens_per_s, published)


def _steps(pairs: Pairs) -> Figure | None:
    groups = _grouped(pairs, _step_bar)
    with_floor = any(bar.floor is not None for group in groups.values() for bar in group)
    return bar_chart("Decode step", "ms, median" + ("; line: the floor" if with_floor else ""), groups)


def _step_bar(run: Run, row: RowResult) -> Bar | None:
    if row.step_ms is None:
        return None
    text = f"{run.name}\n{row.row}\n{row.step_ms:,.3f} ms per step of {row.step_rows:,} requests"
    return Bar(run.slot, run.name, row.step_ms, f"{row.step_ms:,.2f}", text, row.floor_step_ms)


def _grouped(pairs: Pairs, make: Callable[[Run, RowResult], Bar | None]) -> dict[str, list[Bar]]:
    """Bars by row of work, in the order in which the rows first appear."""
    bars: dict[str, list[Bar]] = {}
    for run, report in pairs:
        for row in report.rows:
            bar = make(run, row)
            if bar is not None:
                bars.setdefault(str(row.row), []).append(bar)
    return bars


def _profile_chart(run: Run, profile: StepProfile) -> Figure | None:
    kinds = {kind: slot for slot, kind in enumerate(dict.fromkeys([*_KINDS, *profile.by_kind]))}
    parts = [(kinds[kind], kind, ms) for kind, ms in profile.by_kind.items()]
    parts.append((_GAPS, "gaps between kernels", profile.gap_ms))
    return parts_chart(run.name, f"{profile.title}: {profile.time}; traced", "ms", parts)


def list_tables(name: str, report: OfflineReport) -> list[Table | str]:
    parts: list[Table | str] = [*page_tables(name, report.rows)] if report.rows else []
    if report.skipped:
        parts.append(f"{name}: left out. {'; '.join(f'{row.row}: {row.reason}' for row in report.skipped)}.")
    return [*parts, *(kernels_table(name, profile) for profile in report.profiles)]
