"""The results of `tgi bench serve` for people: inference-benchmarker's table, percentiles, and how the client fared."""

from collections.abc import Sequence

from text_generation_inference.bench.report import markdown
from text_generation_inference.bench.serve.results import Phase, Spread

_HEADS = [
    "Benchmark",
    "QPS",
    "E2E Latency (avg)",
    "TTFT (avg)",
    "ITL (avg)",
    "Throughput",
    "Error Rate",
    "Successful Requests",
    "Prompt tokens per req (avg)",
    "Decoded tokens per req (avg)",
]


def tables(phases: Sequence[Phase]) -> str:
    parts = [summary_table(phases), percentile_table(phases)]
    if any(phase.goodput is not None for phase in phases):
        parts.append(goodput_table(phases))
    parts.append(client_table(phases))
    return "\n\n".join(parts)


def summary_table(phases: Sequence[Phase]) -> str:
    rows = [
        [
            phase.name,
            f"{phase.qps:.2f} req/s",
            "-" if phase.e2e is None else f"{phase.e2e.average / 1e3:.2f} sec",
            _ms(phase.ttft),
            _ms(phase.itl),
            f"{phase.output_tokens_per_s:.2f} tokens/sec",
            f"{phase.error_rate:.2%}",
            f"{phase.num_successful}/{phase.num_successful + phase.num_failed}",
            f"{phase.prompt_tokens:.2f}",
            f"{phase.decoded_tokens:.2f}",
        ]
        for phase in phases
    ]
    return markdown(_HEADS, rows)


def percentile_table(phases: Sequence[Phase]) -> str:
    """In milliseconds."""
    heads = ["Benchmark"]
    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        heads += [f"{name} p50", "p90", "p99"]
    rows: list[list[str]] = []
    for phase in phases:
        row = [phase.name]
        for spread in (phase.ttft, phase.itl, phase.tpot, phase.e2e):
            row += ["-"] * 3 if spread is None else [f"{value:.2f}" for value in (spread.p50, spread.p90, spread.p99)]
        rows.append(row)
    return markdown(heads, rows)


def goodput_table(phases: Sequence[Phase]) -> str:
    limits = next(phase.goodput.limits_ms for phase in phases if phase.goodput is not None)
    within = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in limits.items())
    rows = [
        [phase.name, f"{phase.goodput.per_s:.2f} req/s", f"{phase.goodput.share:.2%}", str(phase.goodput.num_requests)]
        for phase in phases
        if phase.goodput is not None
    ]
    return markdown(["Benchmark", f"Goodput ({within})", "Share", "Requests"], rows)


def client_table(phases: Sequence[Phase]) -> str:
    """Of the measuring itself."""
    rows = [
        [
            phase.name,
            "-" if phase.lag is None else f"{phase.lag.p50:.2f}",
            "-" if phase.lag is None else f"{phase.lag.p99:.2f}",
            f"{phase.client_cpu:.0%}",
            "yes" if phase.client_limited else "no",
            f"{phase.seconds:.1f}",
            str(phase.num_unfinished),
        ]
        for phase in phases
    ]
    heads = ["Benchmark", "Client lag p50, ms", "p99", "of a core", "was the limit", "seconds", "cut off"]
    return markdown(heads, rows)


def error_lines(phase: Phase) -> list[str]:
    return [f"{phase.name}: {count} x {error}" for error, count in phase.errors.items()]


def limit_line(phases: Sequence[Phase]) -> str | None:
    """Says so when the client may have been the bottleneck."""
    limited = [phase for phase in phases if phase.client_limited]
    if not limited:
        return None
    cpu = max(phase.client_cpu for phase in limited)
    late = max((phase.lag.p99 for phase in limited if phase.lag is not None), default=0.0)
    return (
        f"the client may have been the limit in {', '.join(phase.name for phase in limited)}: it took up to {cpu:.0%}"
        f" of a core, and its timers were up to {late:.1f} ms late (p99). Times may be too long by that; try more"
        " --client-processes, or another machine than the server's"
    )


def _ms(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.average:.2f} ms"
