"""What `text-generation-benchmark` measures, as plain data, and its formulas.

Pure Python.
"""

import math

import msgspec

from text_generation_inference.bench.results import BenchmarkReport, Spread


class BatchResult(msgspec.Struct, kw_only=True):
    """One batch size, a value for each run."""

    batch_size: int
    prefill_ms: list[float] = []
    decode_total_ms: list[float] = []
    decode_token_ms: list[float] = []
    prefill_tokens_per_s: list[float] = []
    decode_tokens_per_s: list[float] = []
    prefill_steps: int = 1  # the most of any run; above 1 the batch was too large for a step

    def add_run(self, lengths: tuple[int, int], prefill_seconds: float, decode_seconds: float) -> None:
        """`lengths` are those of the prompt and of the answer, whose first token comes from the prefill."""
        sequence_length, decode_length = lengths
        num_calls = decode_length - 1
        self.prefill_ms.append(round(1e3 * prefill_seconds, 4))
        self.prefill_tokens_per_s.append(round(self.batch_size * sequence_length / prefill_seconds, 3))
        if num_calls:
            self.decode_total_ms.append(round(1e3 * decode_seconds, 4))
            self.decode_token_ms.append(round(1e3 * decode_seconds / num_calls, 4))
            self.decode_tokens_per_s.append(round(self.batch_size * num_calls / decode_seconds, 3))


class StaticReport(BenchmarkReport, kw_only=True):
    sequence_length: int
    decode_length: int
    runs: int
    warmups: int
    notes: list[str] = msgspec.field(
        default_factory=list
    )  # how the engine came up and why its limits are what they are
    batches: list[BatchResult] = msgspec.field(default_factory=list)


def summarise(values: list[float]) -> Spread:
    """Of the runs of a batch size. NaN where there was no run."""
    if not values:
        return Spread(*[math.nan] * 6)
    ordered = sorted(values)
    average = math.fsum(values) / len(values)
    return Spread(average, ordered[0], ordered[-1], *(percentile(ordered, p) for p in (50, 90, 99)))


def percentile(ordered: list[float], p: int) -> float:
    """The value at floor(p / 100 x n) of the sorted list, counted from 0; NaN where the list has none there."""
    index = p * len(ordered) // 100
    return ordered[index] if index < len(ordered) else math.nan
