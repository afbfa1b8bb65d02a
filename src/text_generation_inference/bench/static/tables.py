"""The tables of `text-generation-benchmark`. On a terminal, names, order and formats are those of TGI's tool."""

from collections.abc import Callable
from itertools import pairwise

from text_generation_inference.bench.static.results import BatchResult, summarise
from text_generation_inference.bench.static.task import StaticTask
from text_generation_inference.bench.tables import Column, Table, make_table, markdown, text_cells

Pick = Callable[[BatchResult], list[float]]

LATENCIES: dict[str, Pick] = {
    "Prefill": lambda batch: batch.prefill_ms,
    "Decode (token)": lambda batch: batch.decode_token_ms,
    "Decode (total)": lambda batch: batch.decode_total_ms,
}
RATES: dict[str, Pick] = {
    "Prefill": lambda batch: batch.prefill_tokens_per_s,
    "Decode": lambda batch: batch.decode_tokens_per_s,
}
_FIGURES = ("Average", "Lowest", "Highest", "p50", "p90", "p99")


def _columns(steps: dict[str, Pick], figures: tuple[str, ...], unit: str) -> list[Column]:
    """Of a row that is (step, batch)."""
    shown = [
        Column(name, lambda row, name=name: getattr(summarise(steps[row[0]](row[1])), name.lower()), unit=unit)
        for name in figures
    ]
    return [Column("Step", lambda row: row[0]), Column("Batch Size", lambda row: str(row[1].batch_size)), *shown]


_LATENCY = _columns(LATENCIES, _FIGURES, "ms")
_THROUGHPUT = _columns(RATES, _FIGURES[:3], "tokens/secs")


def page_tables(name: str, batches: list[BatchResult]) -> list[Table]:
    return [
        make_table(f"{name}: latency", _LATENCY, _rows(LATENCIES, batches), num_names=2),
        make_table(f"{name}: throughput", _THROUGHPUT, _rows(RATES, batches), num_names=2),
    ]


def all_tables(task: StaticTask, batches: list[BatchResult]) -> str:
    return "\n\n".join([parameters_table(task), latency_table(batches), throughput_table(batches)])


def parameters_table(task: StaticTask) -> str:
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
    return markdown(["Parameter", "Value"], rows, plain=True)


def latency_table(batches: list[BatchResult]) -> str:
    return _by_step(_LATENCY, _rows(LATENCIES, batches))


def throughput_table(batches: list[BatchResult]) -> str:
    return _by_step(_THROUGHPUT, _rows(RATES, batches))


def _rows(steps: dict[str, Pick], batches: list[BatchResult]) -> list[tuple[str, BatchResult]]:
    return [(step, batch) for step in steps for batch in batches]


def _by_step(columns: list[Column], rows: list[tuple[str, BatchResult]]) -> str:
    """The step's name stands in its first row only."""
    heads, cells = text_cells(columns, rows)
    again = [False, *(above[0] == below[0] for above, below in pairwise(rows))]
    return markdown(heads, [["" if same else row[0], *row[1:]] for row, same in zip(cells, again, strict=True)], True)


def _optional(value: float | None) -> str:
    return "None" if value is None else f"Some({value})"
