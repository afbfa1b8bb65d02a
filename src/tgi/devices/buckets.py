"""The shapes a device with static graphs runs: one plan, computed the same way for every device.

Level 1, pure Python. Sizes round up, and the largest permitted shape is always in the plan, so every batch within the
limits finds a bucket.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A padded shape: `batch` rows; `length` prompt tokens per row (prefill) or cached blocks per row (decode)."""

    phase: str  # "prefill" or "decode"
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class BucketSteps:
    """Distance between neighbouring sizes."""

    prefill_batch: int
    decode_batch: int
    length: int  # tokens


def steps_up_to(step: int, maximum: int) -> list[int]:
    """step, 2 * step, ... and always `maximum` as the last."""
    if step < 1 or maximum < 1:
        raise ValueError(f"bucket step {step} and maximum {maximum} must be at least 1")
    return [*range(step, maximum, step), maximum]


def decode_sizes(maximum: int) -> list[int]:
    """Numbers of rows to capture decode steps for, up to `maximum`: in steps so small that padding costs little."""
    if maximum < 1:
        raise ValueError(f"maximum {maximum} must be at least 1")
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32)]
    sizes += range(512, max(513, maximum), 64)
    return [*(size for size in sizes if size < maximum), maximum]


def plan_buckets(
    max_input_tokens: int,
    max_total_tokens: int,
    max_batch_size: int,
    max_batch_prefill_tokens: int,
    block_size: int,
    steps: BucketSteps,
) -> list[Bucket]:
    """Every shape to prepare, in order: prefill shapes within the prefill budget, then decode shapes."""
    lengths = steps_up_to(steps.length, max_input_tokens)
    prefill = [
        Bucket("prefill", batch, length)
        for length in lengths
        for batch in _prefill_batches(steps.prefill_batch, max_batch_size, max_batch_prefill_tokens // length)
    ]
    blocks = sorted({-(-length // block_size) for length in steps_up_to(steps.length, max_total_tokens)})
    decode = [
        Bucket("decode", batch, count) for batch in steps_up_to(steps.decode_batch, max_batch_size) for count in blocks
    ]
    return prefill + decode


def _prefill_batches(step: int, max_batch_size: int, max_rows: int) -> list[int]:
    """Batch sizes whose rows fit the prefill budget; a single row is always possible, its prompt may be chunked."""
    if max_rows < 2 or max_batch_size < 2:
        return [1]
    return sorted({1, *steps_up_to(step, min(max_batch_size, max_rows))})


def find_bucket(buckets: Sequence[Bucket], phase: str, batch: int, length: int) -> Bucket | None:
    """The smallest planned shape that holds the batch; None if it exceeds the plan."""
    fitting = [b for b in buckets if b.phase == phase and b.batch >= batch and b.length >= length]
    return min(fitting, key=lambda b: (b.batch * b.length, b.batch), default=None)


def round_up(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending sizes that is at least `size`."""
    index = bisect_left(sizes, size)
    if index == len(sizes):
        raise ValueError(f"{size} exceeds the largest bucket, {sizes[-1]}")
    return sizes[index]
