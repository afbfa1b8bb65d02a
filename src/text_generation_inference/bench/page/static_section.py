"""Static batches on the page: latency and throughput for each batch size."""

import math

from text_generation_inference.bench.page.charts import Figure, Line, Point, line_chart
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.static.results import StaticReport, summarise
from text_generation_inference.bench.static.tables import LATENCIES, RATES, Pick, page_tables
from text_generation_inference.bench.tables import Table

TERMS = {
    "Prefill": "one step over all prompts of the batch, up to the first token of each",
    "Decode": "the steps after it; total: all of them, token: total / steps",
    "Prefill tokens/s": "batch size x sequence length / prefill latency",
    "Decode tokens/s": "batch size x decode steps / decode latency",
    "p50, p90, p99": "the value at place floor(p x runs / 100) of the sorted runs, counted from 0",
}

Pairs = list[tuple[Run, StaticReport]]


def draw(pairs: Pairs) -> list[tuple[str | None, list[Figure | None]]]:
    """Charts in groups, each with a heading if it needs one."""
    slow = {name: LATENCIES[name] for name in ("Prefill", "Decode (token)")}
    charts = [
        *(_by_batch(pairs, f"{name} latency", "ms", pick) for name, pick in slow.items()),
        *(_by_batch(pairs, f"{name} throughput", "tokens/s", pick) for name, pick in RATES.items()),
        *(
            _over_latency(pairs, name, pick, fast)
            for (name, fast), pick in zip(RATES.items(), slow.values(), strict=True)
        ),
    ]
    return [(None, charts)]


def _by_batch(pairs: Pairs, title: str, unit: str, pick: Pick) -> Figure | None:
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
    note = "average, lowest to highest"
    return line_chart(title, note, "batch size", lines, y_unit=unit, x_log=True, y_log=False, x_ticks=sizes)


def _over_latency(pairs: Pairs, name: str, slow: Pick, fast: Pick) -> Figure | None:
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
    return line_chart(f"{name} throughput over latency", note, f"ms per {step}", lines, y_log=False)


def list_tables(name: str, report: StaticReport) -> list[Table | str]:
    return [*page_tables(name, report.batches)]
