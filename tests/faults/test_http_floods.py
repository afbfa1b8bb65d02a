"""Floods of connections against a server as a user starts it: probes are answered, refusals are told, counted and logged."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest
from dropping import encode
from raw_http import Answers, connect
from serving import NO_TLS, Server
from traffic import counting, native

LIMIT = 300
HALF = (
    b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"inputs":"'
)


@pytest.fixture(scope="module")
def small(model_cache: Path) -> Iterator[Server]:
    """Started with few descriptors, of which it may have more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        server = Server("--max-total-tokens", "1024", "--max-connections", str(LIMIT), cache=model_cache, wait=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    server.wait_until_serving()
    yield server
    assert server.stop() == 0, server.log[-3000:]


def slowest_health(server: Server, count: int) -> float:
    """Each on a connection of its own, as probes do it."""
    worst = 0.0
    for _ in range(count):
        start = time.monotonic()
        assert httpx.get(server.url + "/health", timeout=30, verify=NO_TLS).status_code == 200
        worst = max(worst, time.monotonic() - start)
    return worst


def refused(server: Server, reason: str) -> float:
    return server.metrics().get(f'tgi_http_refused{{reason="{reason}"}}', 0)


def test_all_descriptors_are_used(small: Server) -> None:
    limits = Path(f"/proc/{small.children()['api']}/limits").read_text()
    soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert soft == hard and int(soft) > 256


def test_1300_half_bodies(small: Server) -> None:
    """Every probe is answered while they hold all connections; a request is told to come again, and is served later."""
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    with ExitStack() as held:
        for number in range(1300):
            sock = held.enter_context(connect(small.port))
            sock.sendall(HALF)
            if number % 100 == 99:
                assert slowest_health(small, 1) < 5
        assert small.metrics()["tgi_http_connections"] == LIMIT
        assert slowest_health(small, 20) < 5
        answer = httpx.post(small.url + "/generate", json=body, timeout=30, verify=NO_TLS)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "too many connections" in answer.text
        assert refused(small, "connections") > 500
    lines = [line for line in small.lines if "Connections are refused" in line]
    assert 1 <= len(lines) <= 10
    small.wait_for(lambda: httpx.post(small.url + "/generate", json=body, verify=NO_TLS).status_code == 200, "room")


def test_2000_idle_connections(small: Server) -> None:
    """They make room for whoever asks for something."""
    before = refused(small, "connections")
    with ExitStack() as held:
        for number in range(2000):
            held.enter_context(connect(small.port))
            if number % 200 == 199:
                answer = httpx.post(small.url + "/tokenize", json={"inputs": "a"}, timeout=30, verify=NO_TLS)
                assert answer.status_code == 200
        assert small.metrics()["tgi_http_evicted"] > 1000
        assert refused(small, "connections") == before


def test_draining_closes_connections_with_their_answers(small: Server) -> None:
    """Keep-alive clients learn that they must go elsewhere. Last of this file: the server ends."""
    path, body = native(counting(3), 200)
    with connect(small.port, 60) as stream, connect(small.port, 60) as idle:
        answers = Answers(idle)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answers.read() == 200 and b"connection: close" not in answers.data
        stream.sendall(encode(path, body))
        stream.recv(1)
        small.process.terminate()
        small.wait_for(lambda: "Draining" in small.log, "the drain to begin")
        idle.sendall(encode("/generate", {"inputs": "a"}))
        assert answers.read() == 503
        assert b"connection: close\r\n" in answers.data and b"retry-after" in answers.data
        assert idle.recv(1) == b""
        data = b""
        while piece := stream.recv(65536):
            data += piece
        events = [line for line in data.split(b"\n") if line.startswith(b"data:")]
        assert json.loads(events[-1].partition(b":")[2])["generated_text"]
    assert small.process.wait(60) == 0, small.log[-3000:]


def test_clients_that_half_close(server: Server) -> None:
    """As `nc -N` does: the request is answered, stream or not."""
    for path, mark in (("/generate", b"generated_text"), ("/generate_stream", b'"details"')):
        with connect(server.port, 60) as sock:
            sock.sendall(encode(path, {"inputs": "a", "parameters": {"max_new_tokens": 20, "details": True}}))
            sock.shutdown(socket.SHUT_WR)
            data = b""
            while piece := sock.recv(65536):
                data += piece
            assert mark in data and b" 200 OK" in data
