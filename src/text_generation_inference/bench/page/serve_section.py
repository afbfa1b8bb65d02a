"""Serving on the page: latency and throughput against the rate, distributions, and the tables.

A phase called "warmup" is in the tables and not in the charts.
"""

from collections.abc import Callable
from itertools import accumulate

from text_generation_inference.bench.page.lines import Chart, Line, Point, line_chart
from text_generation_inference.bench.page.markup import Markup, tag
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.page.ridges import Ridge, filled, ridge_chart
from text_generation_inference.bench.page.scale import number
from text_generation_inference.bench.page.tables import table
from text_generation_inference.bench.serve.results import Histogram, Phase, ServeReport, Spread

METRICS = (
    ("TTFT", "Time to first token", lambda phase: phase.ttft),
    ("ITL", "Time between tokens", lambda phase: phase.itl),
    ("TPOT", "Time per output token", lambda phase: phase.tpot),
    ("E2E", "Whole request", lambda phase: phase.e2e),
)
TERMS = (
    ("QPS", "successful requests per second of the phase; one that its end cut off counts as far as it got"),
    ("E2E latency", "from sending a request to the end of its answer"),
    ("TTFT", "from sending a request to its first token"),
    ("ITL", "between one token and the next; every gap counts once"),
    ("TPOT", "from the first token to the last / (tokens - 1); every request counts once"),
    ("Throughput", "tokens received per second of the phase"),
    ("Error rate", "failed requests / requests that ended"),
    ("Closed loop", "so many users, each sending a request when its last one has ended"),
)

Pairs = list[tuple[Run, ServeReport]]
Pick = Callable[[Phase], Spread | None]
PickCounts = Callable[[Phase], Histogram | None]


def draw(pairs: Pairs) -> list[tuple[str | None, list[Markup | None]]]:
    """Charts in groups, each with a heading if it needs one."""
    groups: list[tuple[str | None, list[Markup | None]]] = [
        (
            None,
            [
                *(_latency_chart(pairs, title, pick) for name, title, pick in METRICS if name != "TPOT"),
                _throughput_by_rate(pairs),
                _throughput_by_users(pairs),
            ],
        )
    ]
    if len(pairs) > 1:
        charts = [_shares(pairs, title, pick) for title, pick, _ in _COUNTED]
        groups.append(("Distributions in the fullest phase of each run", charts))
    for run, report in pairs:
        heading = f"Distributions in {run.name}" if len(pairs) > 1 else "Distributions"
        groups.append((heading, [_ridges(run, report, *counted) for counted in _COUNTED]))
    return groups


def _shown(report: ServeReport) -> list[Phase]:
    return [phase for phase in report.phases if phase.name != "warmup"]


def _is_closed(phase: Phase) -> bool:
    return phase.mode == "throughput"


# -- charts --------------------------------------------------------------------------------------------------------


def _latency_chart(pairs: Pairs, title: str, pick: Pick) -> Markup | None:
    lines: list[Line] = []
    for run, report in pairs:
        points: dict[bool, list[Point]] = {False: [], True: []}
        for phase in _shown(report):
            spread = pick(phase)
            if spread is not None:
                text = (
                    f"{phase.name}\n{phase.qps:.2f} requests/s\np50 {spread.p50:,.1f} ms\np90 {spread.p90:,.1f} ms\n"
                    f"p99 {spread.p99:,.1f} ms"
                )
                point = Point(phase.qps, spread.p50, text, spread.p50, spread.p99)
                points[_is_closed(phase)].append(point)
        lines.append(Line(run.name, run.slot, points[False], points[True]))
    note = "median, band to the 99th percentile"
    if any(line.apart for line in lines):
        note += "; hollow: closed loop"
    return line_chart(Chart(title, note, "requests/s", lines, "ms"))


def _throughput_by_rate(pairs: Pairs) -> Markup | None:
    lines: list[Line] = []
    for run, report in pairs:
        points = [
            Point(phase.rate, phase.output_tokens_per_s, _throughput_text(phase))
            for phase in _shown(report)
            if phase.rate is not None and not _is_closed(phase)
        ]
        apart = [
            Point(phase.qps, phase.output_tokens_per_s, _throughput_text(phase))
            for phase in _shown(report)
            if _is_closed(phase)
        ]
        lines.append(Line(run.name, run.slot, points, apart))
    x_name = "requests/s asked for; closed loop: reached"
    return line_chart(Chart("Throughput", "tokens/s; hollow: closed loop", x_name, lines, y_log=False))


def _throughput_by_users(pairs: Pairs) -> Markup | None:
    lines = [
        Line(
            run.name,
            run.slot,
            [
                Point(phase.users, phase.output_tokens_per_s, _throughput_text(phase))
                for phase in _shown(report)
                if _is_closed(phase) and phase.users
            ],
        )
        for run, report in pairs
    ]
    users = sorted({point.x for line in lines for point in line.points})
    if len(users) < 2:
        return None
    chart = Chart("Throughput", "tokens/s, closed loop", "users at a time", lines, x_log=None, y_log=False)
    return line_chart(chart)


def _throughput_text(phase: Phase) -> str:
    return f"{phase.name}\n{phase.qps:.2f} requests/s\n{phase.output_tokens_per_s:,.1f} tokens/s"


def _shares(pairs: Pairs, title: str, pick: PickCounts) -> Markup | None:
    """Of each run's closed loop with most users, or else of its fastest phase."""
    lines: list[Line] = []
    for run, report in pairs:
        phases = [phase for phase in _shown(report) if (found := pick(phase)) is not None and filled(found)]
        if phases:
            phase = max(phases, key=lambda phase: (_is_closed(phase), phase.users or 0, phase.qps))
            histogram = pick(phase)
            assert histogram is not None
            lines.append(Line(run.name, run.slot, _rising(histogram, phase.name), marked=False))
    if len(lines) < 2:
        return None
    longest = max(point.x for line in lines for point in line.points)
    unit = "s" if longest > 5000 else "ms"
    if unit == "s":
        lines = [_in_seconds(line) for line in lines]
    chart = Chart(title, "share of values up to a time", unit, lines, x_log=None, y_log=False)
    return line_chart(chart)


def _rising(histogram: Histogram, name: str) -> list[Point]:
    bins = filled(histogram)
    total = sum(count for _, _, count in bins)
    sums = accumulate(count for _, _, count in bins)
    start = Point(max(bins[0][0], bins[0][1] / 100), 0.0)
    return [start, *(Point(high, sum_ / total, name) for (_, high, _), sum_ in zip(bins, sums, strict=True))]


def _in_seconds(line: Line) -> Line:
    points = [Point(point.x / 1e3, point.y, point.text) for point in line.points]
    return Line(line.name, line.slot, points, marked=line.marked)


def _ridges(run: Run, report: ServeReport, title: str, pick: PickCounts, spread: Pick) -> Markup | None:
    found = [(phase, pick(phase)) for phase in _shown(report)]
    ridges = [Ridge(phase.name, counts, spread(phase)) for phase, counts in found if counts is not None]
    return ridge_chart(title, "line: median; dotted: 99th percentile", run.slot, ridges)


_COUNTED: tuple[tuple[str, PickCounts, Pick], ...] = (
    ("Time to first token", lambda phase: phase.ttft_histogram, lambda phase: phase.ttft),
    ("Time between tokens", lambda phase: phase.itl_histogram, lambda phase: phase.itl),
)


# -- tables --------------------------------------------------------------------------------------------------------


def list_tables(run: Run, report: ServeReport) -> list[Markup]:
    phases = report.phases
    parts = [
        table(f"{run.name}: results", _RESULT_HEADS, [result_cells(phase) for phase in phases]),
        table(
            f"{run.name}: latency, ms",
            ["Benchmark", "", "average", "lowest", "p50", "p90", "p99", "highest"],
            [cells for phase in phases for cells in spread_cells(phase)],
            groups=2,
        ),
    ]
    for limits in dict.fromkeys(_limits(phase) for phase in phases if phase.goodput is not None):
        cells = [_goodput_cells(phase) for phase in phases if _limits(phase) == limits]
        parts.append(table(f"{run.name}: requests within {limits}", _GOODPUT_HEADS, cells))
    errors = [[phase.name, why, f"{count:,}"] for phase in phases for why, count in phase.errors.items()]
    if errors:
        parts.append(table(f"{run.name}: errors", ["Benchmark", "Reason", "Requests"], errors, groups=2))
    parts.append(table(f"{run.name}: the client itself", _CLIENT_HEADS, [_client_cells(phase) for phase in phases]))
    slowed = [phase.name for phase in phases if phase.client_limited]
    if slowed:
        text = (
            f"The client may have been the slower side in {', '.join(slowed)}: its own figures limit what these show."
        )
        parts.append(tag("p", text, class_="warning"))
    return parts


_RESULT_HEADS = [
    "Benchmark",
    "QPS, req/s",
    "E2E latency (avg), s",
    "TTFT (avg), ms",
    "ITL (avg), ms",
    "Throughput, tokens/s",
    "Error rate",
    "Successful requests",
    "Prompt tokens per request",
    "Decoded tokens per request",
]
_GOODPUT_HEADS = ["Benchmark", "Requests", "Share of all", "per second"]
_CLIENT_HEADS = ["Benchmark", "lag p50, ms", "lag p99, ms", "of a core", "was the limit", "seconds", "cut off"]


def result_cells(phase: Phase) -> list[str]:
    return [
        phase.name,
        number(phase.qps, 2),
        number(phase.e2e.average / 1e3 if phase.e2e else None, 2),
        number(phase.ttft.average if phase.ttft else None, 2),
        number(phase.itl.average if phase.itl else None, 2),
        number(phase.output_tokens_per_s, 2),
        f"{phase.error_rate:.2%}",
        f"{phase.num_successful:,} / {phase.num_successful + phase.num_failed:,}",
        number(phase.prompt_tokens, 2),
        number(phase.decoded_tokens, 2),
    ]


def spread_cells(phase: Phase) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, _, pick in METRICS:
        spread = pick(phase)
        if spread is not None:
            values = (spread.average, spread.lowest, spread.p50, spread.p90, spread.p99, spread.highest)
            rows.append([phase.name, name, *(number(value, 2) for value in values)])
    return rows


def _goodput_cells(phase: Phase) -> list[str]:
    good = phase.goodput
    assert good is not None
    return [phase.name, f"{good.num_requests:,}", f"{good.share:.1%}", number(good.per_s, 2)]


def _limits(phase: Phase) -> str:
    limits = phase.goodput.limits_ms if phase.goodput else {}
    return ", ".join(f"{name.upper()} {limit:,g} ms" for name, limit in limits.items())


def _client_cells(phase: Phase) -> list[str]:
    lag = phase.lag
    limited = "yes" if phase.client_limited else "no"
    figures = [number(lag.p50 if lag else None, 2), number(lag.p99 if lag else None, 2)]
    return [
        phase.name,
        *figures,
        f"{phase.client_cpu:.0%}",
        limited,
        number(phase.seconds, 1),
        f"{phase.num_unfinished:,}",
    ]
