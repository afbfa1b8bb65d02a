"""The results of `tgi bench serve` for people: inference-benchmarker's table, percentiles, and how the client fared."""

from collections.abc import Callable, Sequence

from text_generation_inference.bench.results import Spread
from text_generation_inference.bench.serve.results import Phase
from text_generation_inference.bench.tables import Column, Table, make_table, markdown_table

Pick = Callable[[Phase], Spread | None]

METRICS: dict[str, Pick] = {
    "TTFT": lambda phase: phase.ttft,
    "ITL": lambda phase: phase.itl,
    "TPOT": lambda phase: phase.tpot,
    "E2E": lambda phase: phase.e2e,
}
_NAME = Column("Benchmark", lambda phase: phase.name)
_RESULTS = [
    _NAME,
    Column("QPS", lambda phase: phase.qps, unit="req/s"),
    Column("E2E Latency (avg)", lambda phase: phase.e2e and phase.e2e.average / 1e3, unit="sec"),
    Column("TTFT (avg)", lambda phase: phase.ttft and phase.ttft.average, unit="ms"),
    Column("ITL (avg)", lambda phase: phase.itl and phase.itl.average, unit="ms"),
    Column("Throughput", lambda phase: phase.output_tokens_per_s, unit="tokens/sec"),
    Column("Error Rate", lambda phase: phase.error_rate, ".2%"),
    Column("Successful Requests", lambda phase: f"{phase.num_successful}/{phase.num_successful + phase.num_failed}"),
    Column("Prompt tokens per req (avg)", lambda phase: phase.prompt_tokens),
    Column("Decoded tokens per req (avg)", lambda phase: phase.decoded_tokens),
]
_CLIENT = [  # of the measuring itself
    _NAME,
    Column("Client lag p50, ms", lambda phase: phase.lag and phase.lag.p50),
    Column("p99", lambda phase: phase.lag and phase.lag.p99),
    Column("of a core", lambda phase: phase.client_cpu, ".0%"),
    Column("was the limit", lambda phase: "yes" if phase.client_limited else "no"),
    Column("seconds", lambda phase: phase.seconds, ".1f"),
    Column("cut off", lambda phase: phase.num_unfinished, ".0f"),
]


def tables(phases: Sequence[Phase]) -> str:
    parts = [markdown_table(_RESULTS, phases), markdown_table(_percentiles(), phases)]
    good = [phase for phase in phases if phase.goodput is not None]
    if good:
        parts.append(markdown_table(_goodput(f"Goodput ({_limits(good[0])})"), good))
    return "\n\n".join([*parts, markdown_table(_CLIENT, phases)])


def page_tables(name: str, phases: Sequence[Phase]) -> list[Table]:
    spreads = [
        (phase, metric, spread) for phase in phases for metric, pick in METRICS.items() if (spread := pick(phase))
    ]
    made = [
        make_table(f"{name}: results", _RESULTS, phases),
        make_table(f"{name}: latency, ms", _spread_columns(), spreads, num_names=2),
    ]
    for limits in dict.fromkeys(_limits(phase) for phase in phases if phase.goodput is not None):
        within = [phase for phase in phases if phase.goodput is not None and _limits(phase) == limits]
        made.append(make_table(f"{name}: requests within {limits}", _goodput("Goodput"), within))
    errors = [[phase.name, why, f"{count:,}"] for phase in phases for why, count in phase.errors.items()]
    if errors:
        made.append(Table(f"{name}: errors", ["Benchmark", "Reason", "Requests"], errors, num_names=2))
    return [*made, make_table(f"{name}: the client itself", _CLIENT, phases)]


def _percentiles() -> list[Column]:
    """In milliseconds."""
    columns = [_NAME]
    for metric, pick in METRICS.items():
        for name in ("p50", "p90", "p99"):
            head = f"{metric} {name}" if name == "p50" else name
            columns.append(Column(head, lambda phase, pick=pick, name=name: (s := pick(phase)) and getattr(s, name)))
    return columns


def _spread_columns() -> list[Column]:
    names = ("average", "lowest", "p50", "p90", "p99", "highest")
    figures = [Column(name, lambda found, name=name: getattr(found[2], name)) for name in names]
    return [Column("Benchmark", lambda found: found[0].name), Column("Metric", lambda found: found[1]), *figures]


def _goodput(head: str) -> list[Column]:
    return [
        _NAME,
        Column(head, lambda phase: phase.goodput.per_s, unit="req/s"),
        Column("Share", lambda phase: phase.goodput.share, ".2%"),
        Column("Requests", lambda phase: phase.goodput.num_requests, ".0f"),
    ]


def _limits(phase: Phase) -> str:
    limits = phase.goodput.limits_ms if phase.goodput else {}
    return ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in limits.items())


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
