"""What is measured and what came of it, as plain data.

Pure Python.
"""

import re
from typing import Any

import msgspec

from text_generation_inference.errors import StartError


class Row(msgspec.Struct, frozen=True):
    """`requests` prompts of `inputs` tokens, `outputs` new ones each."""

    inputs: int
    outputs: int
    requests: int

    @property
    def length(self) -> int:
        return self.inputs + self.outputs

    def __str__(self) -> str:
        return f"{self.inputs}/{self.outputs} x{self.requests}"


class Published(msgspec.Struct):
    """What somebody else reported for the same work, on other hardware."""

    model: str
    hardware: str
    cards: int
    output_tokens_per_s: float


class RowResult(msgspec.Struct, kw_only=True):
    """What one row measured, over all its iterations. None where there was nothing to measure."""

    inputs: int
    outputs: int
    requests: int
    iterations: int = 1
    seconds: float  # of all iterations together
    iteration_seconds: list[float] = []
    output_tokens_per_s: float  # iterations x requests x outputs / seconds, so prompts take part in the time
    total_tokens_per_s: float  # prompt tokens count too
    step_ms: float | None  # median of the decode steps with most rows
    step_rows: int  # requests in each of those
    host_ms: float | None  # of those steps: planning, queueing and taking the result, mostly while the device works
    first_token_ms: float | None  # median over requests, from the start of the row
    first_token_max_ms: float | None
    num_steps: int
    num_prefill_steps: int  # steps with prompt tokens
    num_preemptions: int
    peak_memory_gb: float | None = None  # on the device; on a CPU, of the process
    floor_step_ms: float | None = None  # see `floor`
    floor_tokens_per_s: float | None = None
    of_floor: float | None = None
    published: Published | None = None

    @property
    def row(self) -> Row:
        return Row(self.inputs, self.outputs, self.requests)


class SkippedRow(msgspec.Struct):
    """A row of a preset that this machine cannot do as it was published."""

    inputs: int
    outputs: int
    requests: int
    reason: str

    @property
    def row(self) -> Row:
        return Row(self.inputs, self.outputs, self.requests)


def parse_row(text: str) -> Row:
    """Raises `StartError` if it is not IN/OUT/REQUESTS."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}(/[1-9][0-9]{0,8}){2}", text):
        raise StartError(f"row {text!r} is not IN/OUT/REQUESTS: three numbers above 0, such as 200/800/64")
    return Row(*(int(part) for part in text.split("/")))


class Kernel(msgspec.Struct):
    name: str
    kind: str  # "products", "attention", "copies" or "other"
    ms: float  # per step
    calls: float  # per step


class StepProfile(msgspec.Struct, kw_only=True):
    """One decode step, or whole prompts, in as many steps as they take. `wall_ms` is not traced; the rest is."""

    rows: int
    context: int  # tokens of each, while decoding or of the prompt
    prompts: bool = False
    wall_ms: float  # from result to result, or from the first step to the last result, median
    traced_ms: float  # from the start of a step to that of the next, median; of prompts all of it
    kernel_ms: float  # sum over kernels, mean
    busy_ms: float  # at least one kernel runs
    gap_ms: float  # none does
    by_kind: dict[str, float]
    kernels: list[Kernel]  # longest first

    @property
    def title(self) -> str:
        if self.prompts:
            return f"{self.rows} prompts of {self.context:,} tokens"
        return f"one decode step of {self.rows} rows at {self.context:,} tokens"

    @property
    def time(self) -> str:
        return f"{self.wall_ms:,.3f} ms {'to the last' if self.prompts else 'from result to'} result"


class Spread(msgspec.Struct, frozen=True):
    """Of one quantity over runs, requests or tokens."""

    average: float
    lowest: float
    highest: float
    p50: float
    p90: float
    p99: float


class BenchmarkReport(msgspec.Struct, kw_only=True):
    """What the report of every benchmark says. `complete` is false when it was ended early."""

    format: int = 1  # of the file; another number is refused
    benchmark: str  # "offline", "serve" or "static"
    complete: bool = False
    started_at: str  # ISO 8601, UTC
    model: str
    configuration: dict[str, Any]  # what differs from the defaults
    versions: dict[str, str]
    hardware: dict[str, Any]
    commit: str | None


class OfflineReport(BenchmarkReport, kw_only=True):
    ready_seconds: float | None = None  # from the start of the process to a warmed-up engine
    stages: dict[str, float] = {}  # parts of that
    notes: list[str] = []  # how the engine came up and why its limits are what they are
    preset: str | None = None
    rows: list[RowResult] = []
    skipped: list[SkippedRow] = []
    profiles: list[StepProfile] = []
