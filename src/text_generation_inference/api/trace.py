"""Request spans for OpenTelemetry, when `--otlp-endpoint` is given.

Needs the extra `otel`; without an endpoint, or without the packages, a span costs next to nothing and goes
nowhere. Export runs on a thread of its own: a collector that is slow, gone or broken costs spans, never a request. A
span holds names, times and numbers, no prompt and no text of an error.
"""

import asyncio
import logging
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_FLUSH_S = 2.0
_MAX_ATTRIBUTE_CHARS = 1024


class Span:
    """One operation, open while the `with` block runs. This one records nothing."""

    __slots__ = ()

    def set(self, **fields: str | int | float | bool) -> None:
        """Add fields to the span."""

    def fail(self, kind: str) -> None:
        """The operation failed: `kind` is the kind of error, never its text."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_NO_SPAN = Span()


class Tracer:
    """Makes request spans. This one makes none."""

    @staticmethod
    def start(endpoint: str | None, service_name: str) -> "Tracer":
        """A tracer that exports to an OTLP gRPC collector such as `http://localhost:4317`."""
        if not endpoint:
            return Tracer()
        try:
            return _OtlpTracer(endpoint, service_name)
        except ImportError as error:
            log.warning(
                "No traces: %s is missing. Install it with `pip install text-generation-inference[otel]`",
                error.name or "OpenTelemetry",
            )
        except Exception as error:
            log.warning("No traces: cannot export to --otlp-endpoint %s: %s", endpoint, error)
        return Tracer()

    def request_span(self, name: str, headers: Mapping[str, str]) -> Span:
        """A span named after the operation (`generate`), child of the caller's `traceparent` if there is a valid one.

        Names of headers are lower case.
        """
        return _NO_SPAN

    def stop(self, timeout_s: float = _FLUSH_S) -> None:
        """Send what is left, for a limited time."""


class _OtlpTracer(Tracer):
    def __init__(self, endpoint: str, service_name: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": service_name}),
            span_limits=SpanLimits(max_attribute_length=_MAX_ATTRIBUTE_CHARS),
            shutdown_on_exit=False,  # it would wait for the collector without a limit
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.lower().startswith("https://"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tgi")
        self._propagator = TraceContextTextMapPropagator()
        log.info("Exporting traces to %s as %s", endpoint, service_name)

    def request_span(self, name: str, headers: Mapping[str, str]) -> Span:
        return _OtlpSpan(self._tracer, name, self._propagator.extract(headers))

    def stop(self, timeout_s: float = _FLUSH_S) -> None:
        # The library's own shutdown may wait for the collector much longer, hence a thread that may be left behind.
        flush = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
        flush.start()
        flush.join(timeout_s)
        if flush.is_alive():
            log.warning("Some traces were not sent: the collector did not take them within %s s", timeout_s)


class _OtlpSpan(Span):
    """Never the current span of a context: a stream may end in another task than the one that began it."""

    __slots__ = ("_context", "_name", "_span", "_tracer")

    def __init__(self, tracer: Any, name: str, context: Any) -> None:
        self._tracer, self._name, self._context = tracer, name, context
        self._span: Any = None

    def set(self, **fields: str | int | float | bool) -> None:
        self._span.set_attributes(fields)

    def fail(self, kind: str) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, kind)

    def __enter__(self) -> "Span":
        from opentelemetry.trace import SpanKind

        self._span = self._tracer.start_span(self._name, context=self._context, kind=SpanKind.SERVER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self._span.set_attribute("cancelled", True)
        elif kind is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, kind.__name__)
        self._span.end()
