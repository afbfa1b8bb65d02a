"""From what the client processes saw of a phase to its line in the tables. The formulas are in docs/benchmarking.md.

Works on whole arrays; a phase may have millions of tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from text_generation_inference.bench.results import Spread
from text_generation_inference.bench.serve.client_pool import Record
from text_generation_inference.bench.serve.messages import Outcome
from text_generation_inference.bench.serve.prompts import Prompt
from text_generation_inference.bench.serve.results import Goodput, LatencyHistogram, Phase, RequestDetail

CPU_LIMIT = 0.85  # share of a core that one client process may take
LAG_LIMIT_MS = 10.0  # p99
_MOST_KINDS_OF_ERROR = 20
_BINS = 40


@dataclass(slots=True)
class _Seen:
    """One request with its times, in milliseconds."""

    outcome: Outcome
    times: np.ndarray  # seconds of the monotonic clock
    gaps: np.ndarray
    num_tokens: int
    prompt_tokens: int

    @property
    def ttft(self) -> float | None:
        return 1e3 * (self.times[0] - self.outcome.sent) if len(self.times) else None

    @property
    def e2e(self) -> float | None:
        return None if self.outcome.end is None else 1e3 * (self.outcome.end - self.outcome.sent)

    @property
    def tpot(self) -> float | None:
        if len(self.times) < 2 or self.num_tokens < 2:
            return None
        return 1e3 * (self.times[-1] - self.times[0]) / (self.num_tokens - 1)


def summarise(
    record: Record,
    prompts: Mapping[int, Prompt],
    name: str,
    mode: str,
    users: int | None = None,
    rate: float | None = None,
    limits_ms: Mapping[str, float] | None = None,
    with_details: bool = False,
) -> Phase:
    seen = [_see(outcome, prompts[outcome.number]) for outcome in sorted(record.outcomes, key=lambda o: o.sent)]
    good = [one for one in seen if one.outcome.end is not None and one.outcome.error is None]
    failed = [one for one in seen if one.outcome.error is not None]
    unfinished = [one for one in seen if one.outcome.end is None and one.outcome.error is None]
    seconds = _seconds(record, seen, bool(unfinished))
    num_tokens = sum(one.num_tokens for one in good) + sum(one.num_tokens for one in unfinished)
    decoded = sum(one.num_tokens for one in good) / len(good) if good else 0.0
    tokens_per_s = num_tokens / seconds if seconds else 0.0
    if unfinished and decoded:
        qps = tokens_per_s / decoded  # an answer that was cut off counts as far as it got
    else:
        qps = len(good) / seconds if seconds else 0.0
    ttfts = [value for one in good if (value := one.ttft) is not None]
    gaps = np.concatenate([one.gaps for one in good]) if good else np.empty(0)
    num_ended = len(good) + len(failed)
    lag = spread_of(_lags_ms(record, is_planned=users is None))
    cpu = max((done.cpu_seconds / max(done.ended - done.started, 1e-9) for done in record.finished), default=0.0)
    starved = max(
        (done.starved_seconds / max(done.ended - done.started, 1e-9) for done in record.finished), default=0.0
    )
    return Phase(
        name=name,
        mode=mode,
        users=users,
        rate=rate,
        seconds=round(seconds, 4),
        num_sent=len(seen),
        num_successful=len(good),
        num_failed=len(failed),
        num_unfinished=len(unfinished),
        errors=_count_errors(failed),
        error_rate=len(failed) / num_ended if num_ended else 0.0,
        qps=round(qps, 4),
        output_tokens_per_s=round(tokens_per_s, 3),
        prompt_tokens=round(sum(one.prompt_tokens for one in good) / len(good), 3) if good else 0.0,
        decoded_tokens=round(decoded, 3),
        ttft=spread_of(ttfts),
        itl=spread_of(gaps),
        tpot=spread_of([value for one in good if (value := one.tpot) is not None]),
        e2e=spread_of([value for one in good if (value := one.e2e) is not None]),
        ttft_histogram=histogram_of(ttfts),
        itl_histogram=histogram_of(gaps),
        goodput=_goodput(good, limits_ms, num_ended, seconds) if limits_ms else None,
        lag=lag,
        client_cpu=round(cpu, 4),
        client_limited=cpu > CPU_LIMIT or starved > 0.01 or (lag is not None and lag.p99 > LAG_LIMIT_MS),
        requests=[_detail(one, record) for one in seen] if with_details else None,
    )


def _see(outcome: Outcome, prompt: Prompt) -> _Seen:
    times = np.frombuffer(outcome.times, dtype=np.float64)
    is_over = outcome.end is not None and outcome.error is None
    counted = outcome.num_generated if is_over and outcome.num_generated is not None else len(times)
    prompt_tokens = prompt.num_tokens if prompt.num_tokens is not None else outcome.num_prompt or 0
    return _Seen(outcome, times, 1e3 * np.diff(times), counted, prompt_tokens)


def _seconds(record: Record, seen: Sequence[_Seen], is_cut: bool) -> float:
    """From the first request to the last end; to the end of the phase if answers were cut off there."""
    if not seen:
        return 0.0
    ends = [one.outcome.end for one in seen if one.outcome.end is not None]
    if is_cut:
        ends += [done.ended for done in record.finished]
        ends += [one.times[-1] for one in seen if len(one.times)]
    return max(ends, default=seen[0].outcome.sent) - seen[0].outcome.sent


def _count_errors(failed: Sequence[_Seen]) -> dict[str, int]:
    """Most frequent first; what is said only now and then is counted together."""
    counts = Counter(one.outcome.error for one in failed).most_common()
    shown = {str(error): count for error, count in counts[:_MOST_KINDS_OF_ERROR]}
    others = sum(count for _, count in counts[_MOST_KINDS_OF_ERROR:])
    return {**shown, "other errors": others} if others else shown


def spread_of(values: Sequence[float] | np.ndarray) -> Spread | None:
    """None for nothing. Percentiles are interpolated between neighbours."""
    found = np.asarray(values, dtype=np.float64)
    if not len(found):
        return None
    p50, p90, p99 = np.percentile(found, [50, 90, 99])
    numbers = (found.mean(), found.min(), found.max(), p50, p90, p99)
    return Spread(*(round(float(number), 4) for number in numbers))


def histogram_of(values: Sequence[float] | np.ndarray) -> LatencyHistogram | None:
    """Bins of growing width when the values are orders of magnitude apart, else of one width."""
    found = np.asarray(values, dtype=np.float64)
    if not len(found):
        return None
    lowest, highest = max(0.0, float(found.min())), float(found.max())
    if highest <= lowest:
        edges = np.array([lowest, lowest + 1e-3])
    elif highest < 8 * max(lowest, 1e-9):
        edges = np.linspace(lowest, highest, _BINS + 1)
    else:
        first = max(lowest, highest / 1e4, 1e-3)
        edges = np.geomspace(first, highest, _BINS + 1 - (lowest < first))
        edges = np.concatenate([[lowest], edges]) if lowest < first else edges
    counts, edges = np.histogram(np.clip(found, edges[0], edges[-1]), bins=edges)
    return LatencyHistogram([round(float(edge), 6) for edge in edges], [int(count) for count in counts])


def _goodput(good: Sequence[_Seen], limits_ms: Mapping[str, float], num_ended: int, seconds: float) -> Goodput:
    """A limit on ITL is met when no gap of the request is longer. What was not measured meets its limit."""
    met = 0
    for one in good:
        longest = float(one.gaps.max()) if len(one.gaps) else None
        values = {"ttft": one.ttft, "itl": longest, "tpot": one.tpot, "e2e": one.e2e}
        if all((value := values[name]) is None or value <= limit for name, limit in limits_ms.items()):
            met += 1
    return Goodput(
        limits_ms=dict(limits_ms),
        num_requests=met,
        share=met / num_ended if num_ended else 0.0,
        per_s=round(met / seconds, 4) if seconds else 0.0,
    )


def _lags_ms(record: Record, is_planned: bool) -> np.ndarray:
    """How late timers of the client were: those that only measure it, and those of requests that were due."""
    parts = [1e3 * np.frombuffer(done.lags, dtype=np.float64) for done in record.finished]
    if is_planned:
        parts.append(np.array([1e3 * (outcome.sent - outcome.planned) for outcome in record.outcomes]))
    return np.concatenate(parts) if parts else np.empty(0)


def _detail(one: _Seen, record: Record) -> RequestDetail:
    outcome = one.outcome
    begin = min((done.started for done in record.finished), default=outcome.planned)
    return RequestDetail(
        planned=round(outcome.planned - begin, 6),
        sent=round(outcome.sent - begin, 6),
        first=round(float(one.times[0]) - begin, 6) if len(one.times) else None,
        last=round(float(one.times[-1]) - begin, 6) if len(one.times) else None,
        end=None if outcome.end is None else round(outcome.end - begin, 6),
        prompt_tokens=one.prompt_tokens,
        decoded_tokens=one.num_tokens,
        gaps_ms=[round(float(gap), 4) for gap in one.gaps],
        error=outcome.error,
        is_finished=outcome.end is not None,
    )
