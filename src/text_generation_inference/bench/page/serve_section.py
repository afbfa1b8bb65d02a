"""Serving on the page: latency and throughput against the rate, and distributions.

A phase called "warmup" is in the tables and not in the charts.
"""

from collections.abc import Callable
from itertools import accumulate

from text_generation_inference.bench.page.charts import Figure, Line, Point, Ridge, filled, line_chart, ridge_chart
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.serve.results import LatencyHistogram, Phase, ServeReport
from text_generation_inference.bench.serve.tables import METRICS, Pick, page_tables
from text_generation_inference.bench.tables import Table

TERMS = {
    "QPS": "successful requests per second of the phase; one that its end cut off counts as far as it got",
    "E2E latency": "from sending a request to the end of its answer",
    "TTFT": "from sending a request to its first token",
    "ITL": "between one token and the next; every gap counts once",
    "TPOT": "from the first token to the last / (tokens - 1); every request counts once",
    "Throughput": "tokens received per second of the phase",
    "Error rate": "failed requests / requests that ended",
    "Closed loop": "so many users, each sending a request when its last one has ended",
}
_LATENCIES = {"TTFT": "Time to first token", "ITL": "Time between tokens", "E2E": "Whole request"}

Pairs = list[tuple[Run, ServeReport]]
PickCounts = Callable[[Phase], LatencyHistogram | None]
_COUNTED: tuple[tuple[str, PickCounts, Pick], ...] = (
    (_LATENCIES["TTFT"], lambda phase: phase.ttft_histogram, METRICS["TTFT"]),
    (_LATENCIES["ITL"], lambda phase: phase.itl_histogram, METRICS["ITL"]),
)


def draw(pairs: Pairs) -> list[tuple[str | None, list[Figure | None]]]:
    """Charts in groups, each with a heading if it needs one."""
    latencies = [_latency_chart(pairs, title, METRICS[name]) for name, title in _LATENCIES.items()]
    groups: list[tuple[str | None, list[Figure | None]]] = [
        (None, [*latencies, _throughput_by_rate(pairs), _throughput_by_users(pairs)])
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


def _latency_chart(pairs: Pairs, title: str, pick: Pick) -> Figure | None:
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
    return line_chart(title, note, "requests/s", lines, y_unit="ms")


def _throughput_by_rate(pairs: Pairs) -> Figure | None:
    lines: list[Line] = []
    for run, report in pairs:
        phases = _shown(report)
        points = [
            _throughput(phase, phase.rate) for phase in phases if phase.rate is not None and not _is_closed(phase)
        ]
        apart = [_throughput(phase, phase.qps) for phase in phases if _is_closed(phase)]
        lines.append(Line(run.name, run.slot, points, apart))
    x_name = "requests/s asked for; closed loop: reached"
    return line_chart("Throughput", "tokens/s; hollow: closed loop", x_name, lines, y_log=False)


def _throughput_by_users(pairs: Pairs) -> Figure | None:
    lines: list[Line] = []
    for run, report in pairs:
        phases = [phase for phase in _shown(report) if _is_closed(phase)]
        points = [_throughput(phase, phase.users) for phase in phases if phase.users]
        lines.append(Line(run.name, run.slot, points))
    if len({point.x for line in lines for point in line.points}) < 2:
        return None
    return line_chart("Throughput", "tokens/s, closed loop", "users at a time", lines, x_log=None, y_log=False)


def _throughput(phase: Phase, at: float) -> Point:
    text = f"{phase.name}\n{phase.qps:.2f} requests/s\n{phase.output_tokens_per_s:,.1f} tokens/s"
    return Point(at, phase.output_tokens_per_s, text)


def _shares(pairs: Pairs, title: str, pick: PickCounts) -> Figure | None:
    """Of each run's closed loop with most users, or else of its fastest phase."""
    found: list[tuple[Run, str, LatencyHistogram]] = []
    for run, report in pairs:
        phases = [phase for phase in _shown(report) if (counts := pick(phase)) is not None and filled(counts)]
        if phases:
            phase = max(phases, key=lambda phase: (_is_closed(phase), phase.users or 0, phase.qps))
            found.append((run, phase.name, pick(phase) or LatencyHistogram([], [])))
    if len(found) < 2:
        return None
    longest = max(high for _, _, histogram in found for _, high, _ in filled(histogram))
    unit, factor = ("s", 1e-3) if longest > 5000 else ("ms", 1.0)
    lines = [Line(run.name, run.slot, _rising(counts, name, factor), marked=False) for run, name, counts in found]
    return line_chart(title, "share of values up to a time", unit, lines, x_log=None, y_log=False)


def _rising(histogram: LatencyHistogram, name: str, factor: float) -> list[Point]:
    bins = filled(histogram)
    total = sum(count for _, _, count in bins)
    sums = accumulate(count for _, _, count in bins)
    start = Point(factor * max(bins[0][0], bins[0][1] / 100), 0.0)
    return [start, *(Point(factor * high, sum_ / total, name) for (_, high, _), sum_ in zip(bins, sums, strict=True))]


def _ridges(run: Run, report: ServeReport, title: str, pick: PickCounts, spread: Pick) -> Figure | None:
    found = [(phase, pick(phase)) for phase in _shown(report)]
    ridges = [Ridge(phase.name, counts, spread(phase)) for phase, counts in found if counts is not None]
    return ridge_chart(title, "line: median; dotted: 99th percentile", run.slot, ridges)


def list_tables(name: str, report: ServeReport) -> list[Table | str]:
    parts: list[Table | str] = [*page_tables(name, report.phases)]
    slowed = [phase.name for phase in report.phases if phase.client_limited]
    if slowed:
        where = ", ".join(slowed)
        parts.append(f"The client may have been the slower side in {where}: its own figures limit what these show.")
    return parts
