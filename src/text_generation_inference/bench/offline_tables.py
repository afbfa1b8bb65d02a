"""The tables of `tgi bench offline`, for the terminal and for the page."""

from text_generation_inference.bench.results import Published, RowResult, StepProfile
from text_generation_inference.bench.tables import Column, Table, make_table, markdown_table

_COLUMNS = {
    "row": Column("in/out x requests", lambda row: str(row.row)),
    "output": Column("output tok/s", lambda row: row.output_tokens_per_s, ",.1f"),
    "total": Column("total tok/s", lambda row: row.total_tokens_per_s, ",.1f"),
    "iterations": Column("iterations", lambda row: row.iterations, ".0f"),
    "seconds": Column("seconds", lambda row: row.seconds),
    "step": Column("step ms", lambda row: row.step_ms, ",.3f"),
    "host": Column("host ms", lambda row: row.host_ms, ",.3f"),
    "first": Column("TTFT ms", lambda row: row.first_token_ms, ",.1f"),
    "first_max": Column("TTFT max", lambda row: row.first_token_max_ms, ",.1f"),
    "steps": Column("steps", lambda row: row.num_steps, ".0f"),
    "preempted": Column("preempted", lambda row: row.num_preemptions, ".0f"),
    "peak": Column("peak GB", lambda row: row.peak_memory_gb, ",.2f", optional=True),
    "floor": Column("floor tok/s", lambda row: row.floor_tokens_per_s, ",.1f", optional=True),
    "floor_step": Column("floor step ms", lambda row: row.floor_step_ms, ",.3f", optional=True),
    "of_floor": Column("of floor", lambda row: row.of_floor, ".1%", optional=True),
}
_TERMINAL = "row output total step host first first_max steps peak floor floor_step of_floor published"
_PAGE = {
    "throughput": "row output published floor of_floor total iterations seconds",
    "steps, first tokens and memory": "row step floor_step host first first_max steps preempted peak",
}


def rows_table(rows: list[RowResult]) -> str:
    return markdown_table(_pick(_TERMINAL, rows), rows)


def page_tables(name: str, rows: list[RowResult]) -> list[Table]:
    return [make_table(f"{name}: {caption}", _pick(names, rows), rows) for caption, names in _PAGE.items()]


def _pick(names: str, rows: list[RowResult]) -> list[Column]:
    head = name_published([row.published for row in rows if row.published is not None])
    published = Column(head, lambda row: row.published and published_cell(row.published), optional=True)
    return [_COLUMNS.get(name, published) for name in names.split()]


def published_cell(published: Published) -> str:
    """The figure and how many cards gave it."""
    return f"{published.output_tokens_per_s:,.0f} ({published.cards} card{'s' if published.cards > 1 else ''})"


def name_published(published: list[Published]) -> str:
    """Whose figures they are."""
    return "published: " + "; ".join(dict.fromkeys(f"{one.model} on {one.hardware}" for one in published))


# -- steps taken apart -------------------------------------------------------------------------------------


def profile_table(profile: StepProfile) -> str:
    parts = [*profile.by_kind.items(), ("gaps between kernels", profile.gap_ms)]
    columns = [
        Column("part", lambda part: part[0]),
        Column("ms", lambda part: part[1], ".3f"),
        Column("of it", lambda part: _share(profile, part[1]), ".1%"),
    ]
    head = (
        f"{profile.title[0].upper()}{profile.title[1:]}: {profile.time}; traced {profile.traced_ms:.3f} ms:"
        f" {profile.kernel_ms:.3f} ms in kernels, {profile.gap_ms:.3f} ms between them"
    )
    ms, share, calls, part, kernel = _kernel_columns(profile, 90)
    kernels = markdown_table([ms, share, calls, part, kernel], profile.kernels[:18])
    return "\n\n".join([head, markdown_table(columns, parts), kernels])


def kernels_table(name: str, profile: StepProfile) -> Table:
    caption = f"{name}: kernels of {profile.title}, {profile.time} ({profile.traced_ms:.3f} traced)"
    ms, share, calls, part, kernel = _kernel_columns(profile, 160)
    return make_table(caption, [kernel, part, ms, share, calls], profile.kernels[:12])


def _kernel_columns(profile: StepProfile, name_length: int) -> tuple[Column, ...]:
    return (
        Column("ms", lambda kernel: kernel.ms, ".4f"),
        Column("of it", lambda kernel: _share(profile, kernel.ms), ".1%"),
        Column("calls", lambda kernel: kernel.calls, "g"),
        Column("part", lambda kernel: kernel.kind),
        Column("kernel", lambda kernel: kernel.name[:name_length]),
    )


def _share(profile: StepProfile, ms: float) -> float:
    return ms / max(profile.wall_ms, 1e-9)
