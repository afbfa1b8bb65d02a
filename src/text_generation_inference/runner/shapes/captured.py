"""The shapes of steps over block tables: decode steps, and steps with few prompt tokens, padded to sizes that are
captured; any other step has its exact size. Without sizes every step is exact."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from text_generation_inference.runner.shapes.buckets import Bucket

_MOST_MIXED_ROWS = 256
_MOST_TOKENS, _MOST_TOKENS_IN_FP8 = 1024, 2048


class CapturedShapes:
    pads = cuts = False

    def __init__(
        self,
        sizes: Iterable[int] = (),  # numbers of rows that decode steps are padded to
        captured: Iterable[int] = (),  # those of them that are captured
        mixed: Iterable[tuple[int, int]] = (),  # (decode rows, prompt tokens), ascending in their sum
    ) -> None:
        captured = set(captured)
        self._sizes = sorted({*sizes, *captured})
        self.decode = tuple(Bucket("decode", size, 0) for size in self._sizes)
        self.mixed = tuple(Bucket("mixed", *size) for size in mixed)
        decode = [bucket for bucket in self.decode if bucket.batch in captured]
        self.shapes = (*self.mixed[::-1], *decode[::-1])  # the largest first: smaller ones fit into its memory

    def find(self, phase: str, rows: int, length: int, context: int = 0, pictures: int = 0) -> Bucket | None:
        """The one with the fewest tokens that holds so many rows and prompt tokens; None: the step is as it comes."""
        if phase == "decode":
            index = bisect_left(self._sizes, rows)
            return self.decode[index] if index < len(self._sizes) else None
        return next((bucket for bucket in self.mixed if rows <= bucket.batch and length <= bucket.length), None)


EXACT = CapturedShapes()


def plan_captured(max_rows: int, max_tokens: int, wanted: Sequence[int] | None) -> CapturedShapes:
    """For at most so many requests and tokens of a step with prompt tokens; `wanted`: sizes of decode steps to capture
    instead of all, none of them: nothing is captured."""
    sizes = decode_sizes(max_rows)
    captured = [size for size in (sizes if wanted is None else wanted) if 0 < size <= max_rows]
    return CapturedShapes(sizes, captured, mixed_sizes(max_rows, max_tokens) if captured else ())


def most_captured_tokens(max_rows: int, max_total_tokens: int, max_prefill_tokens: int, quantized: bool) -> int:
    """Of a captured step with prompt tokens: a large model computes more of them for longer than the host takes to
    queue the step op by op."""
    most = _MOST_TOKENS_IN_FP8 if quantized else _MOST_TOKENS
    return min(most, max_prefill_tokens, max_rows * (max_total_tokens - 1))


def decode_sizes(maximum: int) -> list[int]:
    """Numbers of rows to capture decode steps for, up to `maximum`: in steps so small that padding costs little."""
    if maximum < 1:
        raise ValueError(f"maximum {maximum} must be at least 1")
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32)]
    sizes += range(512, max(513, maximum), 64)
    return [*(size for size in sizes if size < maximum), maximum]


def mixed_sizes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """(decode rows, prompt tokens) to capture steps with prompt tokens for, ascending in their sum.

    At most `max_tokens` together. `max_rows` is how many requests there may be.
    """
    beside = min(max_rows - 1, _MOST_MIXED_ROWS)  # one of the requests has the prompt
    rows = {0, *(size for size in (16, 64, 128) if size < beside), beside}
    tokens = (32, 64, 128, 256, 384, 512, 768, *range(1024, 2049, 256))
    found = [(row, token) for row in rows for token in tokens if row + token <= max_tokens]
    return sorted(found, key=lambda size: (sum(size), size))
