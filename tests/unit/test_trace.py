"""Spans as a real OTLP collector receives them."""

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from text_generation_inference.api.logs import span_fields
from text_generation_inference.api.metrics import Timings
from text_generation_inference.api.trace import Tracer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(TraceServiceServicer):
    """An OTLP gRPC server in this process."""

    def __init__(self) -> None:
        self.received = []  # (service name, span)
        self.answer = threading.Event()
        self.answer.set()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request, context):
        self.answer.wait(30)
        for resource in request.resource_spans:
            attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.received += [(attributes["service.name"], span) for span in scope.spans]
        return ExportTraceServiceResponse()

    def stop(self) -> None:
        self.answer.set()
        self._server.stop(0).wait()


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture
def tracer(collector):
    return Tracer.start(f"http://127.0.0.1:{collector.port}", "my-service")


def attributes(span: ProtoSpan) -> dict[str, object]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_span_with_its_parent_fields_and_service(collector, tracer):
    timings = Timings(total_s=1.5, validation_s=0.001, queue_s=0.002, inference_s=1.4, generated_tokens=7)
    headers = {"host": "x", "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    with tracer.request_span("generate_stream", headers) as span:
        span.set(**span_fields(timings, seed=3), generated_tokens=7, stream=True)
    tracer.stop()
    [(service, received)] = collector.received
    assert service == "my-service"
    assert received.name == "generate_stream"
    assert received.trace_id.hex() == TRACE_ID and received.parent_span_id.hex() == PARENT_ID
    assert received.kind == ProtoSpan.SPAN_KIND_SERVER
    assert received.end_time_unix_nano >= received.start_time_unix_nano > 0
    assert attributes(received) == {
        "total_time": "1.5s",
        "validation_time": "1ms",
        "queue_time": "2ms",
        "inference_time": "1.4s",
        "time_per_token": "200ms",
        "seed": "Some(3)",
        "generated_tokens": 7,
        "stream": True,
    }


def test_an_unsampled_parent_is_followed_all_the_same(collector, tracer):
    with tracer.request_span("generate", {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}):
        pass
    tracer.stop()
    [(_, received)] = collector.received
    assert received.parent_span_id.hex() == PARENT_ID


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "garbage",
        "\xff\xfe",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        "00-" + "a" * 100_000,
    ],
)
def test_other_forms_are_ignored(collector, tracer, traceparent):
    with tracer.request_span("generate", {"traceparent": traceparent}):
        pass
    tracer.stop()
    [(_, received)] = collector.received
    assert received.parent_span_id == b"" and received.trace_id.hex() != TRACE_ID


def test_spans_of_interleaved_requests_do_not_become_each_others_parents(collector, tracer):
    async def serve(name: str) -> None:
        with tracer.request_span(name, {}) as span:
            await asyncio.sleep(0)
            span.set(name=name)

    async def serve_all() -> None:
        await asyncio.gather(*(serve(f"request-{i}") for i in range(20)))

    asyncio.run(serve_all())
    tracer.stop()
    spans = [span for _, span in collector.received]
    assert {span.name for span in spans} == {f"request-{i}" for i in range(20)}
    assert all(span.parent_span_id == b"" and attributes(span) == {"name": span.name} for span in spans)
    assert len({span.trace_id for span in spans}) == 20


def test_errors_mark_the_span_without_their_text(collector, tracer):
    with pytest.raises(ValueError), tracer.request_span("generate", {}):
        raise ValueError("the user's words")
    with pytest.raises(asyncio.CancelledError), tracer.request_span("generate", {}):
        raise asyncio.CancelledError
    tracer.stop()
    failed, cancelled = [span for _, span in collector.received]
    assert (failed.status.code, failed.status.message) == (Status.STATUS_CODE_ERROR, "ValueError")
    assert not failed.events and b"words" not in failed.SerializeToString()
    assert cancelled.status.code == Status.STATUS_CODE_UNSET and attributes(cancelled) == {"cancelled": True}


def test_long_fields_are_cut(collector, tracer):
    with tracer.request_span("generate", {}) as span:
        span.set(parameters="x" * 100_000)
    tracer.stop()
    assert len(attributes(collector.received[0][1])["parameters"]) == 1024


def test_nothing_happens_without_an_endpoint():
    before = threading.active_count()
    for endpoint in (None, ""):
        tracer = Tracer.start(endpoint, "service")
        with tracer.request_span("generate", {}) as span:
            span.set(seed="None")
        with pytest.raises(ValueError), tracer.request_span("generate", {}):
            raise ValueError
        tracer.stop()
    assert threading.active_count() == before


def test_a_silent_collector_does_not_hold_up_the_end(collector, tracer, caplog):
    collector.answer.clear()
    with tracer.request_span("generate", {}):
        pass
    tracer.stop(timeout_s=0.2)
    assert "traces were not sent" in caplog.text


DEAD_COLLECTOR = """
import sys
from text_generation_inference.api.trace import Tracer
tracer = Tracer.start(sys.argv[1], "service")
for _ in range(5000):  # more than the queue holds
    with tracer.request_span("generate", {}) as span:
        span.set(seed="None")
tracer.stop(0.2)
print("served")
"""


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{port}", "127.0.0.1:{port}", "no such thing"])
def test_a_missing_collector_disturbs_nothing_and_the_process_ends(endpoint):
    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        endpoint = endpoint.format(port=bound.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", DEAD_COLLECTOR, endpoint], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0 and done.stdout == "served\n", done.stderr


def test_missing_packages_are_named(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        tracer = Tracer.start("http://127.0.0.1:4317", "service")
    with tracer.request_span("generate", {}):
        pass
    assert "pip install text-generation-inference[otel]" in caplog.text
