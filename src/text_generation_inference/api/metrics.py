"""What the server counts, and its Prometheus text.

Names, labels, buckets and HELP texts of TGI's metrics are a contract with dashboards; docs/observability.md
lists them all. A metric appears once something was recorded. It knows nothing of HTTP: `/metrics` sends what `render`
returns.
"""

import time
from itertools import accumulate
from typing import Any

import msgspec

from text_generation_inference.api.control import Restarts
from text_generation_inference.api.encoded_series import ENCODED, EncodedSeries
from text_generation_inference.api.metric_series import Family, Histogram, Scalar, Summary, label
from text_generation_inference.api.replica_metrics import FAMILIES, EngineGauges, ReplicaSeries
from text_generation_inference.types import BucketStats, EngineLoad, ModelFacts, StepStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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


class StepSeries:
    """The series of `tgi_batch_*` with one value of the label `method`."""

    def __init__(self, metrics: "Metrics", method: str) -> None:
        labels = label("method", method)
        self.count = metrics.batch_inference_count.keep(Scalar(), labels)
        self.success = metrics.batch_inference_success.keep(Scalar(), labels)
        self.failure = metrics.batch_inference_failure.keep(Scalar(), labels)
        self.inference = metrics.batch_inference_duration.keep(Histogram(DURATION_BOUNDS), labels)
        self.forward = metrics.batch_forward_duration.keep(Histogram(DURATION_BOUNDS), labels)
        self.decode = metrics.batch_decode_duration.keep(Histogram(DURATION_BOUNDS), labels)
        self.filter = metrics.batch_filter_duration.keep(Histogram(DURATION_BOUNDS), labels)
        self.tokens = metrics.batch_tokens.keep(Scalar(), labels)


class BucketSeries:
    """The series of `tgi_bucket_*`: only an engine with a bucket plan has them."""

    def __init__(self, metrics: "Metrics") -> None:
        shapes: Family[Scalar] = metrics.family(
            "tgi_bucket_shapes", "gauge", "Shapes planned, graph keys warmed up, graphs captured"
        )
        self._shapes = {
            state: shapes.keep(Scalar(), label("state", state)) for state in ("planned", "warmed", "captured")
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
            f"{method}_{name}": family.keep(Scalar(), label("method", method))
            for name, family in (("computed", computed), ("needed", needed))
            for method in ("prefill", "decode")
        }
        self._last: dict[int, BucketStats] = {}  # by engine

    @property
    def counters(self) -> list[Scalar]:
        return [self._bypassed, self._unplanned, *self._tokens.values()]

    def set(self, stats: BucketStats, replica: int) -> None:
        self._last[replica] = stats
        for state, number in self._shapes.items():
            number.set(sum(getattr(last, f"num_{state}") for last in self._last.values()))
        self._bypassed.follow(stats.num_bypassed, replica)
        self._unplanned.follow(stats.num_unplanned, replica)
        for name, number in self._tokens.items():
            number.follow(getattr(stats, name), replica)


class Metrics:
    """Every metric of one api process. Not for use by several threads."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int, num_replicas: int = 1) -> None:
        self._gauges = [EngineGauges() for _ in range(num_replicas)]
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
        self.batch_tokens: Family[Scalar] = self.family(
            "tgi_batch_tokens",
            "counter",
            "Tokens computed by steps, of prompts or after them (prefill or decode)",
        )
        self._prefill = StepSeries(self, "prefill")
        self._decode = StepSeries(self, "decode")
        concat: Family[Scalar] = self.family("tgi_batch_concat", "counter")
        self._concat = concat.keep(Scalar(), label("reason", "chunking"))
        concat_duration: Family[Histogram] = self.family("tgi_batch_concat_duration", "histogram")
        self._concat_duration = concat_duration.keep(Histogram(DURATION_BOUNDS), label("method", "decode"))

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
        self._kv_block_tokens = self._gauge("tgi_kv_block_tokens", "Tokens in a block of the KV cache")
        self._kv_ratio = self._gauge("tgi_kv_usage_ratio", "Share of the KV cache that running requests hold")
        self._preemptions = self.counter("tgi_preemptions", "Requests that gave up their blocks to be computed again")
        self._prompt_tokens = self.counter("tgi_prompt_tokens", "Prompt tokens of admitted requests")
        self._encoded: EncodedSeries | None = None  # where the model sees
        self._cached_tokens = self.counter("tgi_cached_prompt_tokens", "Prompt tokens found in the prefix cache")
        self._unknown_fields = self.counter("tgi_unknown_fields", "Fields of request bodies that were ignored")
        self._ranks = self._gauge("tgi_ranks", "Ranks that the model is split over")
        self._engine_restarts = self.counter("tgi_engine_restarts", "Times the engine was started again")
        malformed: Family[Scalar] = self.family(
            "tgi_malformed_messages",
            "counter",
            "Messages that were dropped, by the process that could not read them",
        )
        self._dropped_by_api = malformed.keep(Scalar(), label("by", "api"))
        self._dropped_by_engine = malformed.keep(Scalar(), label("by", "engine"))
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
        self._memory_used: Family[Scalar] = self.family(
            "tgi_device_memory_used_bytes", "gauge", "Memory in use on the device of an engine's first rank"
        )
        self._memory_total: Family[Scalar] = self.family(
            "tgi_device_memory_limit_bytes", "gauge", "Memory that there is on the device of an engine's first rank"
        )
        self._heartbeat_age = self._gauge("tgi_engine_heartbeat_age_seconds", "Since the engine's last sign of life")
        self._bucket_shapes = BucketSeries(self)
        self._replicas: list[ReplicaSeries] = []
        if num_replicas > 1:
            families: dict[str, Family[Scalar]] = {
                name: self.family(f"tgi_replica_{name}", *about) for name, about in FAMILIES.items()
            }
            self._replicas = [ReplicaSeries(families, number) for number in range(num_replicas)]
        start = self._gauge("process_start_time_seconds", "Start of the process, in seconds since 1970")
        start.set(round(time.time(), 3))

    def ranks(self, count: int) -> None:
        self._ranks.set(count)

    # -- requests --------------------------------------------------------------------------------------------------

    def count_request(self) -> None:
        self._request_count.add()

    def fail_request(self, err: str) -> None:
        """`err`: validation, overloaded, template, generation, incomplete, dropped or slow_client."""
        if err not in self._failures:
            self._failures[err] = self._request_failure.keep(Scalar(), label("err", err))
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
        """So many wait for a pool: validate, grammar, hard_grammar, template, long_template, fetch or picture."""
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

    def engine_ready(self, facts: ModelFacts, replica: int = 0) -> None:
        """An engine is up, for the first time or again."""
        gauges = self._gauges[replica]
        gauges.kv_total = facts.num_blocks - 1  # one is for padding and belongs to nobody
        gauges.kv_used = 0
        self._kv_block_tokens.set(facts.block_size)
        self._show_kv()
        followed = [self._preemptions, self._prompt_tokens, self._cached_tokens, self._dropped_by_engine]
        if self._replicas:
            series = self._replicas[replica]
            series.up.set(1)
            followed += [series.prompt_tokens, series.cached_tokens]
        followed += self._encoded.counters if self._encoded is not None else []
        for counter in (*followed, *self._bucket_shapes.counters):
            counter.follow_from_zero(replica)

    def engine_lost(self, replica: int) -> None:
        """One of several: the sums are over the others until it is back."""
        if self._replicas:
            self._gauges[replica] = EngineGauges()
            self._show_batch(replica)
            self._show_kv()
            self._replicas[replica].up.set(0)

    def engine_responds(self, responds: bool, replica: int) -> None:
        if self._replicas:
            self._replicas[replica].up.set(responds)

    def route(self, replica: int, reason: str) -> None:
        """A request goes to one of several engines; `reason`: prefix, load or busy."""
        self._replicas[replica].route(reason)

    def drop_message(self) -> None:
        """The engine sent what cannot be read."""
        self._dropped_by_api.add()

    def restarts(self, restarts: Restarts) -> None:
        """Since the launcher started."""
        self._engine_restarts.set(restarts.engine)
        self._engine_hangs.set(restarts.engine_hangs)
        self._api_restarts.set(restarts.api)
        self._api_hangs.set(restarts.api_hangs)
        for series, count in zip(self._replicas, restarts.by_replica, strict=False):
            series.restarts.set(count)

    def dropped_lines(self, count: int) -> None:
        self._dropped_lines.set(count)

    def heartbeat_age(self, seconds: float, replica: int = 0) -> None:
        """Of several engines the oldest is told."""
        self._gauges[replica].heartbeat_age = round(seconds, 3)
        self._heartbeat_age.set(max(gauges.heartbeat_age for gauges in self._gauges))
        if self._replicas:
            self._replicas[replica].heartbeat_age.set(round(seconds, 3))

    def step(self, stats: StepStats, replica: int = 0) -> None:
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
        if stats.num_prompt_tokens:
            self._prefill.tokens.add(stats.num_prompt_tokens)
        if stats.num_decoded:
            self._decode.tokens.add(stats.num_decoded)
        if stats.num_admitted:
            self._batch_next_size.observe(stats.num_admitted)
        if stats.joined:
            self._concat.add()
            self._concat_duration.observe(0.0)  # newcomers take a slot: there is no separate pass to time
        gauges = self._gauges[replica]
        gauges.running, gauges.max_tokens = stats.num_running, stats.max_tokens
        gauges.waiting, gauges.waiting_tokens = stats.num_waiting, stats.num_waiting_tokens
        self._show_batch(replica)

    def fail_step(self, prefill: bool) -> None:
        """A step ended with an error."""
        series = self._prefill if prefill else self._decode
        series.count.add()
        series.failure.add()

    def load(self, load: EngineLoad, replica: int = 0) -> None:
        gauges = self._gauges[replica]
        gauges.running, gauges.waiting = load.num_running, load.num_waiting
        self._show(self._batch_size, "running")
        self._show(self._queue_size, "waiting")
        if load.num_running == 0:  # no further step will say so
            gauges.max_tokens = 0
            self._show(self._batch_max_tokens, "max_tokens")
        if load.num_waiting == 0:
            gauges.waiting_tokens = 0
            self._show(self._queue_tokens, "waiting_tokens")
        gauges.kv_used = gauges.kv_total - load.num_free_blocks
        self._show_kv()
        self._preemptions.follow(load.num_preemptions, replica)
        self._prompt_tokens.follow(load.num_prompt_tokens, replica)
        self._cached_tokens.follow(load.num_cached_prompt_tokens, replica)
        self._dropped_by_engine.follow(load.num_malformed, replica)
        if self._replicas:
            self._replicas[replica].show(gauges)
            self._replicas[replica].prompt_tokens.follow(load.num_prompt_tokens, replica)
            self._replicas[replica].cached_tokens.follow(load.num_cached_prompt_tokens, replica)
        if load.memory is not None:
            self._memory_used.one("replica", str(replica)).set(load.memory.used_bytes)
            self._memory_total.one("replica", str(replica)).set(load.memory.total_bytes)
        if load.buckets is not None:
            self._bucket_shapes.set(load.buckets, replica)
        if load.pictures is not None and self._encoded is not None:
            self._encoded.follow(load.pictures, replica)

    def count_encoded(self) -> None:
        """The model sees."""
        self._encoded = EncodedSeries({field: self.counter(*about) for field, about in ENCODED.items()})

    def _show_batch(self, replica: int) -> None:
        """What is in the engines, all together; `replica` has changed."""
        self._show(self._batch_size, "running")
        self._show(self._batch_max_tokens, "max_tokens")
        self._show(self._queue_size, "waiting")
        self._show(self._queue_tokens, "waiting_tokens")
        if self._replicas:
            self._replicas[replica].show(self._gauges[replica])

    def _show(self, gauge: Scalar, name: str) -> None:
        gauge.set(sum(getattr(gauges, name) for gauges in self._gauges))

    def _show_kv(self) -> None:
        total = sum(gauges.kv_total for gauges in self._gauges)
        self._kv_total.set(total)
        if total:
            used = sum(gauges.kv_used for gauges in self._gauges)
            self._kv_used.set(used)
            self._kv_ratio.set(used / total)

    # -- the text --------------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """The Prometheus text."""
        return "\n".join([line for family in self._families for line in family.lines()] + [""]).encode()

    def numbers(self) -> dict[str, float]:
        """What `render` tells, without buckets, by name and labels as they stand there."""
        return {name: value for family in self._families for name, value in family.numbers()}

    def counts(self, name: str) -> list[int]:
        """Of the histogram with this name: how many fell into each bucket, those above the last bound at the end."""
        return next(family.counts() for family in self._families if family.name == name)

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
