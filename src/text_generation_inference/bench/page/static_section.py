"""Static batches on the page: latency and throughput for each batch size."""

import math
from collections.abc import Callable

from text_generation_inference.bench.page.lines import Chart, Line, Point, line_chart
from text_generation_inference.bench.page.markup import Markup
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.page.scale import number
from text_generation_inference.bench.page.tables import table
from text_generation_inference.bench.static.results import BatchResult, StaticReport, summarise

TERMS = (
    ("Prefill", "one step over all prompts of the batch, up to the first token of each"),
    ("Decode", "the steps after it; total: all of them, token: total / steps"),
    ("Prefill tokens/s", "batch size x sequence length / prefill latency"),
    ("Decode tokens/s", "batch size x decode steps / decode latency"),
    ("p50, p90, p99", "the value at place floor(p x runs / 100) of the sorted runs, counted from 0"),
)
LATENCIES = (
    ("Prefill", lambda batch: batch.prefill_ms),
    ("Decode (token)", lambda batch: batch.decode_token_ms),
    ("Decode (total)", lambda batch: batch.decode_total_ms),
)
RATES = (
    ("Prefill", lambda batch: batch.prefill_tokens_per_s),
    ("Decode", lambda batch: batch.decode_tokens_per_s),
)

Pairs = list[tuple[Run, StaticReport]]
Pick = Callable[[BatchResult], list[float]]


def draw(pairs: Pairs) -> list[tuple[str | None, list[Markup | None]]]:
    """Charts in groups, each with a heading if it needs one."""
    charts = [
        *(_by_batch(pairs, f"{name} latency", "ms", pick) for name, pick in LATENCIES[:2]),
        *(_by_batch(pairs, f"{name} throughput", "tokens/s", pick) for name, pick in RATES),
        *(_over_latency(pairs, name, slow[1], fast) for (name, fast), slow in zip(RATES, LATENCIES, strict=False)),
    ]
    return [(None, charts)]


def _by_batch(pairs: Pairs, title: str, unit: str, pick: Pick) -> Markup | None:
    lines: list[Line] = []
    for run, report in pairs:
        points: list[Point] = []
        for batch in report.batches:
            if pick(batch):
                found = summarise(pick(batch))
                text = f"batch size {batch.batch_size}\naverage {found.average:,.2f} {unit}\n"
                text += f"{found.lowest:,.2f} to {found.highest:,.2f}"
                points.append(Point(batch.batch_size, found.average, text, found.lowest, found.highest))
        lines.append(Line(run.name, run.slot, points))
    sizes = sorted({float(batch.batch_size) for _, report in pairs for batch in report.batches})
    chart = Chart(
        title, "average, lowest to highest", "batch size", lines, unit, x_log=True, y_log=False, x_ticks=sizes
    )
    return line_chart(chart)


def _over_latency(pairs: Pairs, name: str, slow: Pick, fast: Pick) -> Markup | None:
    """As the tool shows it while it runs."""
    lines: list[Line] = []
    for run, report in pairs:
        points: list[Point] = []
        for batch in report.batches:
            latency, rate = summarise(slow(batch)).average, summarise(fast(batch)).average
            if not (math.isnan(latency) or math.isnan(rate)):
                text = f"batch size {batch.batch_size}\n{latency:,.2f} ms\n{rate:,.2f} tokens/s"
                points.append(Point(latency, rate, text))
        lines.append(Line(run.name, run.slot, points))
    step = "prefill" if name == "Prefill" else "decode step"
    note = "tokens/s; a mark for each batch size"
    return line_chart(Chart(f"{name} throughput over latency", note, f"ms per {step}", lines, y_log=False))


def list_tables(run: Run, report: StaticReport) -> list[Markup]:
    return [
        table(
            f"{run.name}: latency, ms",
            ["Step", "Batch size", "Average", "Lowest", "Highest", "p50", "p90", "p99"],
            [[name, *latency_cells(batch, pick)] for name, pick in LATENCIES for batch in report.batches],
            groups=2,
        ),
        table(
            f"{run.name}: throughput, tokens/s",
            ["Step", "Batch size", "Average", "Lowest", "Highest"],
            [[name, *latency_cells(batch, pick)[:4]] for name, pick in RATES for batch in report.batches],
            groups=2,
        ),
    ]


def latency_cells(batch: BatchResult, pick: Pick) -> list[str]:
    found = summarise(pick(batch))
    values = (found.average, found.lowest, found.highest, found.p50, found.p90, found.p99)
    return [str(batch.batch_size), *(number(value, 2) for value in values)]
