"""What the server counts, and its Prometheus text.

Names, labels, buckets and HELP texts of TGI's metrics are a contract with dashboards; docs/observability.md
lists them all. A metric appears once something was recorded. The text is written here because prometheus_client
would append `_total` to every counter. It knows nothing of HTTP: `/metrics` sends what `render` returns.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Generic, TypeVar

import msgspec

from text_generation_inference.api.control import Restarts
from text_generation_inference.types import BucketStats, EngineLoad, ModelFacts, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
# 0.0001 * 1.5^k by repeated multiplication: the same rounding, and so the same `le` values, as TGI's.
DURATION_BOUNDS = list(accumulate([1.5] * 35, float.__mul__, initial=0.0001))[1:]
BATCH_SIZE_BOUNDS = [float(size) for size in range(1, 1025)]


class Timings(msgspec.Struct, frozen=True):
    """Where the time of one finished generation went."""

    total_s: float
    validation_s: float  # arrival to queued
    queue_s: float  # queued to batched
    inference_s: float  # batched to finished
    generated_tokens: int

    @property
    def per_token_s(self) -> float:
        return self.inference_s / max(self.generated_tokens, 1)


def hundredths(maximum: int) -> list[float]:
    """Bounds of the token-count histograms: a hundred equal steps up to the maximum."""
    return [maximum / 100.0 * i for i in range(1, 101)]


# -- one series each -----------------------------------------------------------------------------------------------


class Scalar:
    """The value of a counter or a gauge."""

    __slots__ = ("_last_total", "_recorded", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self._recorded = False
        self._last_total = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount
        self._recorded = True

    def set(self, value: float) -> None:
        self.value = value
        self._recorded = True

    def follow(self, total: int) -> None:
        """Grow with a total that the engine counts."""
        self.add(total - self._last_total)
        self._last_total = total

    def follow_from_zero(self) -> None:
        """That total starts again; this value does not."""
        self._last_total = 0

    def lines(self, name: str, labels: str) -> Iterator[str]:
        if self._recorded:
            yield f"{name}{_braces(labels)} {_text(self.value)}"


class Histogram:
    """How often values fell below each bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: list[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = sum(self._counts)
        if total == 0:
            return
        prefix = f"{name}_bucket{{{labels},le=" if labels else f"{name}_bucket{{le="
        for bound, count in zip(self._bounds, accumulate(self._counts), strict=False):
            yield f'{prefix}"{_text(bound)}"}} {count}'
        yield f'{prefix}"+Inf"}} {total}'
        yield f"{name}_sum{_braces(labels)} {_text(self._sum)}"
        yield f"{name}_count{_braces(labels)} {total}"


class Summary:
    """Quantiles of small whole numbers since the start, exact."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0]  # how often 0, 1, 2 ... were observed

    def observe(self, value: int, times: int = 1) -> None:
        while value >= len(self._counts):
            self._counts.append(0)
        self._counts[value] += times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        ranks = list(accumulate(self._counts))
        total = ranks[-1]
        if total == 0:
            return
        comma = "," if labels else ""
        for quantile in QUANTILES:
            value = bisect_left(ranks, max(quantile * total, 1))
            yield f'{name}{{{labels}{comma}quantile="{_text(quantile)}"}} {value}'
        yield f"{name}_sum{_braces(labels)} {sum(value * count for value, count in enumerate(self._counts))}"
        yield f"{name}_count{_braces(labels)} {total}"


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _label(name: str, value: str) -> str:
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{value}"'


# -- all series of a name ------------------------------------------------------------------------------------------

Series = TypeVar("Series", Scalar, Histogram, Summary)


class Family(Generic[Series]):
    """A metric's name, type, HELP text and series by label value."""

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        self._name = name
        self._head = [f"# HELP {name} {help_text}"] if help_text else []
        self._head.append(f"# TYPE {name} {kind}")
        self._series: dict[str, Series] = {}

    def keep(self, series: Series, labels: str = "") -> Series:
        self._series[labels] = series
        return series

    def one(self: "Family[Scalar]", label: str, value: str) -> Scalar:
        """The number with this value of a label, which is there from its first use."""
        labels = _label(label, value)
        return self._series.get(labels) or self.keep(Scalar(), labels)

    def lines(self) -> list[str]:
        body = [line for labels, series in self._series.items() for line in series.lines(self._name, labels)]
        return [*self._head, *body, ""] if body else []


class StepSeries:
    """The series of `tgi_batch_*` with one value of the label `method`."""

    def __init__(self, metrics: "Metrics", method: str) -> None:
        labels = _label("method", method)
        self.count = metrics.batch_inference_count.keep(Scalar(), labels)
        self.success = metrics.batch_inference_success.keep(Scalar(), labels)
        self.failure = metrics.batch_inference_failure.keep(Scalar(), labels)
        self.inference = metrics.batch_inference_duration.keep(Histogram(DURATION_BOUNDS), labels)
        self.forward = metrics.batch_forward_duration.keep(Histogram(DURATION_BOUNDS), labels)
        self.decode = metrics.batch_decode_duration.keep(Histogram(DURATION_BOUNDS), labels)
        self.filter = metrics.batch_filter_duration.keep(Histogram(DURATION_BOUNDS), labels)


class BucketSeries:
    """The series of `tgi_bucket_*`: only an engine with a bucket plan has them."""

    def __init__(self, metrics: "Metrics") -> None:
        shapes: Family[Scalar] = metrics.family(
            "tgi_bucket_shapes", "gauge", "Shapes planned, graph keys warmed up, graphs captured"
        )
        self._shapes = {
            state: shapes.keep(Scalar(), _label("state", state)) for state in ("planned", "warmed", "captured")
        }
        self._bypassed = metrics.counter("tgi_bucket_bypassed", "Padded passes that ran without a graph")
        self._unplanned = metrics.counter(
            "tgi_bucket_unplanned", "Graph keys met while serving that warming up has not met"
        )
        computed: Family[Scalar] = metrics.family(
            "tgi_bucket_tokens_computed", "counter", "Tokens computed in padded passes, padding included"
        )
        needed: Family[Scalar] = metrics.family(
            "tgi_bucket_tokens_needed", "counter", "Tokens computed in padded passes, without the padding"
        )
        self._tokens = {
            f"{method}_{name}": family.keep(Scalar(), _label("method", method))
            for name, family in (("computed", computed), ("needed", needed))
            for method in ("prefill", "decode")
        }

    @property
    def counters(self) -> list[Scalar]:
        return [self._bypassed, self._unplanned, *self._tokens.values()]

    def set(self, stats: BucketStats) -> None:
        for state, number in self._shapes.items():
            number.set(getattr(stats, f"num_{state}"))
        self._bypassed.follow(stats.num_bypassed)
        self._unplanned.follow(stats.num_unplanned)
        for name, number in self._tokens.items():
            number.follow(getattr(stats, name))


class Metrics:
    """Every metric of one api process. Not for use by several threads."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int) -> None:
        self._families: list[Family[Any]] = []
        total_bounds = hundredths(max_total_tokens)

        self._request_count = self.counter("tgi_request_count", "Total number of requests")
        self._request_success = self.counter("tgi_request_success", "Number of successful requests")
        self._request_failure: Family[Scalar] = self.family("tgi_request_failure", "counter")
        self._failures: dict[str, Scalar] = {}
        self._request_duration = self._duration("tgi_request_duration", "Request duration")
        self._validation_duration = self._duration("tgi_request_validation_duration", "Request validation duration")
        self._queue_duration = self._duration("tgi_request_queue_duration", "Request queue duration")
        self._inference_duration = self._duration("tgi_request_inference_duration", "Request inference duration")
        self._mean_time_per_token = self._duration(
            "tgi_request_mean_time_per_token_duration", "Mean time per token per request"
        )
        self._generated_tokens = self._histogram(
            "tgi_request_generated_tokens", "Generated tokens per request", total_bounds
        )
        self._input_length = self._histogram(
            "tgi_request_input_length", "Input token length per request", hundredths(max_input_tokens)
        )
        self._max_new_tokens = self._histogram(
            "tgi_request_max_new_tokens", "Maximum new tokens per request", total_bounds
        )
        skipped: Family[Summary] = self.family("tgi_request_skipped_tokens", "summary", "Speculated tokens per request")
        self._skipped_tokens = skipped.keep(Summary())

        self._queue_size = self._gauge("tgi_queue_size", "Current queue size")
        self._batch_size = self._gauge("tgi_batch_current_size", "Current batch size")
        self._batch_max_tokens = self._gauge("tgi_batch_current_max_tokens", "Maximum tokens for the current batch")
        self._batch_next_size = self._histogram(
            "tgi_batch_next_size", "Batch size of the next batch", BATCH_SIZE_BOUNDS
        )
        self.batch_inference_count: Family[Scalar] = self.family(
            "tgi_batch_inference_count", "counter", "Inference calls per method (prefill or decode)"
        )
        self.batch_inference_success: Family[Scalar] = self.family(
            "tgi_batch_inference_success",
            "counter",
            "Number of successful inference calls per method (prefill or decode)",
        )
        self.batch_inference_failure: Family[Scalar] = self.family("tgi_batch_inference_failure", "counter")
        self.batch_inference_duration: Family[Histogram] = self.family(
            "tgi_batch_inference_duration", "histogram", "Batch inference duration"
        )
        self.batch_forward_duration: Family[Histogram] = self.family(
            "tgi_batch_forward_duration", "histogram", "Batch forward duration per method (prefill or decode)"
        )
        self.batch_decode_duration: Family[Histogram] = self.family(
            "tgi_batch_decode_duration", "histogram", "Time spent decoding a batch per method (prefill or decode)"
        )
        self.batch_filter_duration: Family[Histogram] = self.family(
            "tgi_batch_filter_duration",
            "histogram",
            "Time spent filtering batches and sending generated tokens per method (prefill or decode)",
        )
        self._prefill = StepSeries(self, "prefill")
        self._decode = StepSeries(self, "decode")
        concat: Family[Scalar] = self.family("tgi_batch_concat", "counter")
        self._concat = concat.keep(Scalar(), _label("reason", "chunking"))
        concat_duration: Family[Histogram] = self.family("tgi_batch_concat_duration", "histogram")
        self._concat_duration = concat_duration.keep(Histogram(DURATION_BOUNDS), _label("method", "decode"))

        self._waiting: Family[Scalar] = self.family(
            "tgi_worker_queue_size", "gauge", "Requests that wait for a worker thread of the api process"
        )
        self._refused_waiting: Family[Scalar] = self.family(
            "tgi_worker_queue_refused", "counter", "Requests refused because they waited too long for a worker thread"
        )
        self._grammars: Family[Scalar] = self.family(
            "tgi_grammar_compilations", "counter", "Grammars compiled or not, by result"
        )
        self._in_flight = self._gauge("tgi_requests_in_flight", "Requests being served, queued ones included")
        self._first_token = self._duration("tgi_time_to_first_token_duration", "From arrival to the first token")
        self._inter_token = self._duration("tgi_inter_token_duration", "Between two tokens of a request")
        self._queue_tokens = self._gauge("tgi_queue_tokens", "Prompt tokens of the queued requests")
        self._kv_used = self._gauge("tgi_kv_blocks_used", "Blocks of the KV cache that running requests hold")
        self._kv_total = self._gauge("tgi_kv_blocks_total", "Blocks of the KV cache")
        self._kv_ratio = self._gauge("tgi_kv_usage_ratio", "Share of the KV cache that running requests hold")
        self._preemptions = self.counter("tgi_preemptions", "Requests that gave up their blocks to be computed again")
        self._prompt_tokens = self.counter("tgi_prompt_tokens", "Prompt tokens of admitted requests")
        self._cached_tokens = self.counter("tgi_cached_prompt_tokens", "Prompt tokens found in the prefix cache")
        self._unknown_fields = self.counter("tgi_unknown_fields", "Fields of request bodies that were ignored")
        self._engine_restarts = self.counter("tgi_engine_restarts", "Times the engine was started again")
        malformed: Family[Scalar] = self.family(
            "tgi_malformed_messages",
            "counter",
            "Messages that were dropped, by the process that could not read them",
        )
        self._dropped_by_api = malformed.keep(Scalar(), _label("by", "api"))
        self._dropped_by_engine = malformed.keep(Scalar(), _label("by", "engine"))
        self._loop_lag = self._duration("tgi_api_loop_lag_seconds", "How late the event loop of the api process runs")
        self._connections = self._gauge("tgi_http_connections", "Open connections")
        self._evicted = self.counter("tgi_http_evicted", "Idle connections closed to make room for new ones")
        self._buffered = self._gauge("tgi_http_buffered_bytes", "Bytes of request bodies that are not complete yet")
        self._http_refused: Family[Scalar] = self.family(
            "tgi_http_refused", "counter", "What was turned away before a route saw it, by reason"
        )
        self._engine_hangs = self.counter("tgi_engine_hangs", "Times the engine was ended because it hung")
        self._api_restarts = self.counter("tgi_api_restarts", "Times the api process was started again")
        self._api_hangs = self.counter("tgi_api_hangs", "Times the api process was ended because it hung")
        for number in (self._engine_restarts, self._engine_hangs, self._api_restarts, self._api_hangs):
            number.set(0)
        self._dropped_lines = self.counter("tgi_log_lines_dropped", "Log lines that nobody read in time")
        self._dropped_lines.set(0)
        self._heartbeat_age = self._gauge("tgi_engine_heartbeat_age_seconds", "Since the engine's last sign of life")
        self._bucket_shapes = BucketSeries(self)
        start = self._gauge("process_start_time_seconds", "Start of the process, in seconds since 1970")
        start.set(round(time.time(), 3))

    # -- requests --------------------------------------------------------------------------------------------------

    def count_request(self) -> None:
        self._request_count.add()

    def fail_request(self, err: str) -> None:
        """`err`: validation, overloaded, template, generation, incomplete, dropped or slow_client."""
        if err not in self._failures:
            self._failures[err] = self._request_failure.keep(Scalar(), _label("err", err))
        self._failures[err].add()

    def count_unknown_fields(self, count: int) -> None:
        self._unknown_fields.add(count)

    def validated(self, input_length: int, max_new_tokens: int) -> None:
        """`max_new_tokens` as far as it was checked, which is at most one chunk."""
        self._input_length.observe(input_length)
        self._max_new_tokens.observe(max_new_tokens)

    def succeed(self, timings: Timings) -> None:
        self._request_success.add()
        self._request_duration.observe(timings.total_s)
        self._validation_duration.observe(timings.validation_s)
        self._queue_duration.observe(timings.queue_s)
        self._inference_duration.observe(timings.inference_s)
        self._mean_time_per_token.observe(timings.per_token_s)
        self._generated_tokens.observe(timings.generated_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def tokens(self, count: int = 1, deliveries: int = 1) -> None:
        """A step brought `count` tokens to a request; `deliveries` requests may be told at once."""
        self._skipped_tokens.observe(count - 1, deliveries)

    def in_flight(self, num_requests: int) -> None:
        self._in_flight.set(num_requests)

    def waiting(self, pool: str, count: int) -> None:
        """So many wait for a pool: validate, grammar, hard_grammar, template or long_template."""
        self._waiting.one("pool", pool).set(count)

    def refuse_waiting(self, pool: str) -> None:
        self._refused_waiting.one("pool", pool).add()

    def grammar(self, result: str) -> None:
        """`result`: compiled, refused, overloaded or cancelled."""
        self._grammars.one("result", result).add()

    def loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    # -- connections -----------------------------------------------------------------------------------------------

    def connections(self, count: int) -> None:
        self._connections.set(count)

    def evict_connection(self) -> None:
        self._evicted.add()

    def buffered_bodies(self, num_bytes: int) -> None:
        self._buffered.set(num_bytes)

    def refuse_http(self, reason: str) -> None:
        """`reason`: connections, body_bytes, malformed or not_reading."""
        self._http_refused.one("reason", reason).add()

    # -- the engine ------------------------------------------------------------------------------------------------

    def engine_ready(self, facts: ModelFacts) -> None:
        """The engine is up, for the first time or again."""
        self._kv_total.set(facts.num_blocks - 1)  # one is for padding and belongs to nobody
        self._set_kv_used(0)
        followed = (self._preemptions, self._prompt_tokens, self._cached_tokens, self._dropped_by_engine)
        for counter in (*followed, *self._bucket_shapes.counters):
            counter.follow_from_zero()

    def drop_message(self) -> None:
        """The engine sent what cannot be read."""
        self._dropped_by_api.add()

    def restarts(self, restarts: Restarts) -> None:
        """Since the launcher started."""
        self._engine_restarts.set(restarts.engine)
        self._engine_hangs.set(restarts.engine_hangs)
        self._api_restarts.set(restarts.api)
        self._api_hangs.set(restarts.api_hangs)

    def dropped_lines(self, count: int) -> None:
        self._dropped_lines.set(count)

    def heartbeat_age(self, seconds: float) -> None:
        self._heartbeat_age.set(round(seconds, 3))

    def step(self, stats: StepStats) -> None:
        """A step ended."""
        if stats.failed:
            self.fail_step(stats.prefill)
            return
        series = self._prefill if stats.prefill else self._decode
        series.count.add()
        series.success.add()
        series.inference.observe(stats.inference_ns * 1e-9)
        series.forward.observe(stats.forward_ns * 1e-9)
        series.decode.observe(stats.decode_ns * 1e-9)
        series.filter.observe(stats.filter_ns * 1e-9)
        if stats.num_admitted:
            self._batch_next_size.observe(stats.num_admitted)
        if stats.joined:
            self._concat.add()
            self._concat_duration.observe(0.0)  # newcomers take a slot: there is no separate pass to time
        self._batch_size.set(stats.num_running)
        self._batch_max_tokens.set(stats.max_tokens)
        self._queue_size.set(stats.num_waiting)
        self._queue_tokens.set(stats.num_waiting_tokens)

    def fail_step(self, prefill: bool) -> None:
        """A step ended with an error."""
        series = self._prefill if prefill else self._decode
        series.count.add()
        series.failure.add()

    def load(self, load: EngineLoad) -> None:
        self._batch_size.set(load.num_running)
        self._queue_size.set(load.num_waiting)
        if load.num_running == 0:  # no further step will say so
            self._batch_max_tokens.set(0)
        if load.num_waiting == 0:
            self._queue_tokens.set(0)
        self._set_kv_used(self._kv_total.value - load.num_free_blocks)
        self._preemptions.follow(load.num_preemptions)
        self._prompt_tokens.follow(load.num_prompt_tokens)
        self._cached_tokens.follow(load.num_cached_prompt_tokens)
        self._dropped_by_engine.follow(load.num_malformed)
        if load.buckets is not None:
            self._bucket_shapes.set(load.buckets)

    def _set_kv_used(self, num_blocks: float) -> None:
        if self._kv_total.value:
            self._kv_used.set(num_blocks)
            self._kv_ratio.set(num_blocks / self._kv_total.value)

    # -- the text --------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """The Prometheus text."""
        return "\n".join([line for family in self._families for line in family.lines()] + [""]).encode()

    def family(self, name: str, kind: str, help_text: str = "") -> Family[Any]:
        family: Family[Any] = Family(name, kind, help_text)
        self._families.append(family)
        return family

    def counter(self, name: str, help_text: str) -> Scalar:
        return self.family(name, "counter", help_text).keep(Scalar())

    def _gauge(self, name: str, help_text: str) -> Scalar:
        return self.family(name, "gauge", help_text).keep(Scalar())

    def _histogram(self, name: str, help_text: str, bounds: list[float]) -> Histogram:
        return self.family(name, "histogram", help_text).keep(Histogram(bounds))

    def _duration(self, name: str, help_text: str) -> Histogram:
        return self._histogram(name, help_text, DURATION_BOUNDS)
