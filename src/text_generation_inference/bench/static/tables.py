"""The three Markdown tables that are printed at the end.

Pure Python. Names, order and formats are those that readers of TGI's tool know.
"""

import math

from text_generation_inference.bench.static.results import BatchResult, summarise
from text_generation_inference.bench.static.task import Task


def parameters_table(task: Task) -> str:
    sampling = task.sampling
    rows = [
        ["Model", task.model.replace("|", "\\|")],
        ["Sequence Length", str(task.sequence_length)],
        ["Decode Length", str(task.decode_length)],
        ["Top N Tokens", _optional(sampling.top_n_tokens)],
        ["N Runs", str(task.runs)],
        ["Warmups", str(task.warmups)],
        ["Temperature", _optional(sampling.temperature)],
        ["Top K", _optional(sampling.top_k)],
        ["Top P", _optional(sampling.top_p)],
        ["Typical P", _optional(sampling.typical_p)],
        ["Repetition Penalty", _optional(sampling.repetition_penalty)],
        ["Frequency Penalty", _optional(sampling.frequency_penalty)],
        ["Watermark", str(sampling.watermark).lower()],
        ["Do Sample", str(sampling.do_sample).lower()],
    ]
    return _markdown(["Parameter", "Value"], rows)


def latency_table(batches: list[BatchResult]) -> str:
    steps = [
        ("Prefill", [batch.prefill_ms for batch in batches]),
        ("Decode (token)", [batch.decode_token_ms for batch in batches]),
        ("Decode (total)", [batch.decode_total_ms for batch in batches]),
    ]
    heads = ["Step", "Batch Size", "Average", "Lowest", "Highest", "p50", "p90", "p99"]
    return _by_step(heads, batches, steps, "ms")


def throughput_table(batches: list[BatchResult]) -> str:
    steps = [
        ("Prefill", [batch.prefill_tokens_per_s for batch in batches]),
        ("Decode", [batch.decode_tokens_per_s for batch in batches]),
    ]
    return _by_step(["Step", "Batch Size", "Average", "Lowest", "Highest"], batches, steps, "tokens/secs")


def all_tables(task: Task, batches: list[BatchResult]) -> str:
    return "\n\n".join([parameters_table(task), latency_table(batches), throughput_table(batches)])


def _by_step(
    heads: list[str], batches: list[BatchResult], steps: list[tuple[str, list[list[float]]]], unit: str
) -> str:
    """The step's name stands in its first row only."""
    rows: list[list[str]] = []
    for step, values_by_batch in steps:
        for number, (batch, values) in enumerate(zip(batches, values_by_batch, strict=True)):
            summary = summarise(values)
            figures = [getattr(summary, head.lower()) for head in heads[2:]]
            name = step if number == 0 else ""
            rows.append([name, str(batch.batch_size), *(f"{plain(figure)} {unit}" for figure in figures)])
    return _markdown(heads, rows)


def plain(figure: float) -> str:
    return "NaN" if math.isnan(figure) else f"{figure:.2f}"


def _optional(value: float | None) -> str:
    return "None" if value is None else f"Some({value})"


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]

    def line(cells: list[str]) -> str:
        return "|" + "|".join(f" {cell.ljust(width)} " for cell, width in zip(cells, widths, strict=True)) + "|"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(heads), rule, *(line(row) for row in rows)])
