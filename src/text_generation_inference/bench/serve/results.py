"""What `tgi bench serve` measures, as plain data. The formulas are in docs/benchmarking.md.

Pure Python.
"""

from typing import Any

import msgspec

from text_generation_inference.bench.results import BenchmarkReport, Spread


class LatencyHistogram(msgspec.Struct):
    """`counts[i]` lie from `edges[i]` (included) to `edges[i + 1]` (excluded; the last included)."""

    edges: list[float]  # milliseconds, rising; one more than counts
    counts: list[int]


class Goodput(msgspec.Struct):
    """Requests that met every limit."""

    limits_ms: dict[str, float]  # of "ttft", "itl", "tpot", "e2e"
    num_requests: int
    share: float  # of all requests, failed ones too
    per_s: float


class RequestDetail(msgspec.Struct, kw_only=True):
    """One request, when details were asked for. Times are seconds from the start of its phase."""

    planned: float  # when it was due
    sent: float
    first: float | None  # first token
    last: float | None
    prompt_tokens: int
    decoded_tokens: int
    gaps_ms: list[float]  # between tokens
    end: float | None = None  # of the answer
    error: str | None = None
    is_finished: bool = True  # false for one that was still running when its phase ended


class Phase(msgspec.Struct, kw_only=True):
    """One line of the table. A Spread is None where nothing was measured."""

    name: str  # such as "warmup", "throughput", "constant@1.50req/s"
    mode: str  # "throughput" (virtual users), "constant" or "poisson"
    users: int | None = None
    rate: float | None = None  # requests per second asked for
    seconds: float
    num_sent: int
    num_successful: int
    num_failed: int
    num_unfinished: int = 0  # still running when the phase ended: neither successful nor failed
    errors: dict[str, int]  # why, how often
    error_rate: float  # share of the requests that ended
    qps: float
    output_tokens_per_s: float
    prompt_tokens: float  # mean per successful request
    decoded_tokens: float
    ttft: Spread | None = None
    itl: Spread | None = None
    tpot: Spread | None = None
    e2e: Spread | None = None
    ttft_histogram: LatencyHistogram | None = None
    itl_histogram: LatencyHistogram | None = None
    goodput: Goodput | None = None
    lag: Spread | None = None  # of the client itself: how late its own timers were
    client_cpu: float  # share of one core
    client_limited: bool  # it may have slowed the measurement: see docs/benchmarking.md
    requests: list[RequestDetail] | None = None


class ServeReport(BenchmarkReport, kw_only=True):
    url: str
    api: str  # "generate", "completions" or "chat"
    tokenizer: str
    profile: str
    server: dict[str, Any] = msgspec.field(default_factory=dict)  # what it says of itself
    notes: list[str] = msgspec.field(default_factory=list)  # what a reader of the figures should know
    phases: list[Phase] = msgspec.field(default_factory=list)
