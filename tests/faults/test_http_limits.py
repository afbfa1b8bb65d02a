"""Limits of time, size and number on connections, with the server's own protocol and real sockets."""

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from raw_http import Answers, connect
from served_here import ServedHere

from text_generation_inference.api import connections, http, protocol
from text_generation_inference.api.connections import derive_limits

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def post(path: str, body: bytes, *more: bytes, length: int | None = None) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"Host: x", b"Content-Type: application/json", *more]
    lines.append(b"Content-Length: %d" % (len(body) if length is None else length))
    return b"\r\n".join([*lines, b"", body])


def ask(port: int, request: bytes = HEALTH) -> tuple[int, bytes]:
    with connect(port) as sock:
        sock.sendall(request)
        answers = Answers(sock)
        return answers.read(), answers.data


def wait_for(condition: Callable[[], object], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def refused(here: ServedHere, reason: str) -> float:
    lines = here.metrics.render().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f'tgi_http_refused{{reason="{reason}"}}'))


def is_closed(sock: socket.socket, timeout_s: float = 20) -> bool:
    sock.settimeout(timeout_s)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


# -- connections -----------------------------------------------------------------------------------------------------


def test_the_limits_that_follow_from_descriptors() -> None:
    assert derive_limits(1024, None) == (728, 56)
    assert derive_limits(1_048_576, None) == (16_384, 256)
    assert derive_limits(1_048_576, 100_000) == (100_000, 256)
    assert derive_limits(1024, 50) == (50, 56)
    for descriptors in (3, 16, 64, 200, 1024, 65536):
        limit, spare = derive_limits(descriptors, 1_000_000)
        assert limit >= 1 and spare >= 1 and (limit + 3 * spare < descriptors or descriptors == 3)


def test_the_soft_limit_is_raised() -> None:
    code = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard));"
        "from text_generation_inference.api.connections import raise_descriptor_limit;"
        "assert raise_descriptor_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_half_bodies_on_every_connection_leave_health_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever comes later and has a body is told to come again; what has no body is answered."""
    with (
        ServedHere(connections=20, spare=5) as here,
        ExitStack() as held,
        caplog.at_level(logging.WARNING, "text_generation_inference.api"),
    ):
        half = post("/tokenize", b"{", length=1000)
        for _ in range(20):
            held.enter_context(connect(here.port)).sendall(half)
        wait_for(lambda: not here.connections._idle)
        for _ in range(8):
            status, data = ask(here.port, post("/tokenize", b'{"inputs":"a"}'))
            assert status == 503 and b"retry-after: 1\r\n" in data and b"connection: close\r\n" in data
            status, data = ask(here.port)
            assert status == 200 and b"connection: close\r\n" in data
        assert refused(here, "connections") == 8
        assert len([record for record in caplog.records if "too many are open" in record.message]) == 1
        held.close()
        wait_for(lambda: ask(here.port, post("/tokenize", b'{"inputs":"a"}'))[0] == 200)


def test_a_reserve_that_others_hold_is_taken_from_them() -> None:
    """Whoever keeps a place in it without asking loses it, with an answer, to the next who comes."""
    with ServedHere(connections=3, spare=2) as here, ExitStack() as held:
        for _ in range(5):
            held.enter_context(connect(here.port)).sendall(b"POST /tokenize HTTP/1.1\r\nHo")
        wait_for(lambda: not here.connections._idle and len(here.connections._unheard) == 2)
        with connect(here.port) as sock:  # it says nothing, for now
            for _ in range(6):
                assert ask(here.port)[0] == 200
                assert ask(here.port, post("/tokenize", b"{}"))[0] == 503
            silent = [held.enter_context(connect(here.port)) for _ in range(2)]
            answers = Answers(sock)
            assert answers.read() == 503 and b"retry-after" in answers.data
            assert is_closed(sock)
        assert ask(here.port)[0] == 200
        assert len(here.connections._leaving) <= 2
        assert silent


def test_idle_connections_make_room() -> None:
    """The oldest goes first; those that wait for an answer stay."""
    with ServedHere(connections=10, spare=2) as here, ExitStack() as held:
        busy = held.enter_context(connect(here.port))
        busy.sendall(post("/slow", b"x"))
        idle = [held.enter_context(connect(here.port)) for _ in range(9)]
        for sock in idle[3:]:
            sock.sendall(HEALTH)
            assert Answers(sock).read() == 200
        for _ in range(30):
            sock = held.enter_context(connect(here.port))
            sock.sendall(HEALTH)
            assert Answers(sock).read() == 200
        assert is_closed(idle[0]) and is_closed(idle[3])
        assert Answers(busy).read() == 200
        assert refused(here, "connections") == 0
        assert b"tgi_http_evicted 30" in here.metrics.render()


def test_many_connections_cost_little_memory() -> None:
    with ServedHere(connections=5000) as here, ExitStack() as held:
        wait_for(lambda: ask(here.port)[0] == 200)
        before = resident()
        for _ in range(500):
            held.enter_context(connect(here.port)).sendall(post("/tokenize", b"{" * 10, length=100_000))
        wait_for(lambda: here.bodies.used == 5000)
        assert resident() - before < 500 * 64 * 1024


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


# -- bodies ----------------------------------------------------------------------------------------------------------


def test_bytes_of_all_bodies_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_BODY_BYTES", 4_000_000)
    monkeypatch.setattr(connections, "SMALL_BODY", 20_000)
    with ServedHere(payload_limit=1_000_000) as here, ExitStack() as held:
        for _ in range(7):
            held.enter_context(connect(here.port)).sendall(post("/tokenize", b"x" * 500_000, length=600_000))
        wait_for(lambda: here.bodies.used == 3_500_000)
        large = json.dumps({"inputs": "x" * 600_000}).encode()
        status, data = ask(here.port, post("/tokenize", large))
        assert status == 503 and b"retry-after: 1\r\n" in data and b"overloaded" in data
        assert here.bodies.used == 3_500_000
        assert ask(here.port, post("/tokenize", b'{"inputs":"small"}'))[0] == 200
        assert ask(here.port)[0] == 200
        assert refused(here, "body_bytes") == 1
        held.close()
        wait_for(lambda: here.bodies.used == 0)
        assert ask(here.port, post("/tokenize", large))[0] == 200


def test_a_body_that_drips_is_bounded_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http, "BODY_TOTAL_TIMEOUT_S", 1.0)
    with ServedHere() as here, connect(here.port) as sock:
        sock.sendall(post("/tokenize", b"", length=1000))
        sock.settimeout(0.1)
        start, data = time.monotonic(), b""
        while not data and time.monotonic() - start < 10:
            sock.sendall(b"x")  # never silent for as long as half a second
            try:
                data = sock.recv(4096)
            except TimeoutError:
                continue
        assert data.startswith(b"HTTP/1.1 408 ") and b"did not come in time" in data
        assert is_closed(sock)


def test_the_rest_of_a_body_that_nobody_waits_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is there before the body: the client has some time for the rest, however it drips."""
    monkeypatch.setattr(protocol, "DISCARD_TIMEOUT_S", 1.0)
    with ServedHere() as here, connect(here.port) as sock:
        sock.sendall(post("/nothing", b"x", length=1000))
        assert Answers(sock).read() == 404
        start = time.monotonic()
        try:
            while time.monotonic() - start < 10:
                sock.sendall(b"x")
                time.sleep(0.1)
        except ConnectionError:
            pass
        assert 0.5 < time.monotonic() - start < 9
    with ServedHere() as here, connect(here.port) as sock:
        answers = Answers(sock)
        sock.sendall(post("/nothing", b"x", length=3))
        assert answers.read() == 404
        sock.sendall(b"xx" + HEALTH)
        assert answers.read() == 200


def test_a_refusal_is_seen_by_a_client_that_is_still_sending() -> None:
    with ServedHere(payload_limit=1000) as here:
        for number in range(20):
            with connect(here.port) as sock:
                sock.sendall(post("/tokenize", b"x" * 300_000, b"Content-Encoding: br", length=600_000))
                sock.sendall(b"x" * (300_000 - number))
                assert Answers(sock).read() == 415


def test_a_head_that_drips_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 1.0)
    with ServedHere() as here, connect(here.port) as silent, connect(here.port) as slow, connect(here.port) as second:
        second.sendall(HEALTH + b"GET /health HTTP/1.1\r\nHost: x\r\n")  # the next head begins with the first
        slow.sendall(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(8):
            time.sleep(0.2)
            slow.sendall(b"a")
        assert Answers(slow).read() == 408
        answers = Answers(second)
        assert [answers.read(), answers.read()] == [200, 408]
        assert is_closed(silent)


@pytest.mark.parametrize("cut", range(len(HEALTH)))
def test_a_head_may_be_cut_anywhere(shared: ServedHere, cut: int) -> None:
    """Behind another request in the same packet, too."""
    with connect(shared.port) as sock:
        answers = Answers(sock)
        sock.sendall(post("/tokenize", b'{"inputs":"a"}') + HEALTH[:cut])
        assert answers.read() == 200
        sock.sendall(HEALTH[cut:])
        assert answers.read() == 200


@pytest.fixture(scope="module")
def shared():
    with ServedHere() as here:
        yield here


# -- readers ---------------------------------------------------------------------------------------------------------


def slow_reader(here: ServedHere, size: int, more: bytes = b"") -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", here.port))
    sock.sendall(b"GET /large?%d HTTP/1.1\r\nHost: x\r\n%s\r\n" % (size, more))
    return sock


def test_a_reader_that_makes_progress_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes four times as long as a client may be silent, and gets everything."""
    monkeypatch.setattr(protocol, "NO_PROGRESS_S", 1.0)
    with ServedHere() as here, slow_reader(here, 8_000_000) as sock:
        size, start = 0, time.monotonic()
        while size < 8_000_000:
            piece = sock.recv(200_000)
            assert piece
            size += len(piece)
            if time.monotonic() - start < 4:
                time.sleep(0.05)
        assert refused(here, "not_reading") == 0


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept alive", "closing"])
def test_a_reader_that_stops_is_gone(monkeypatch: pytest.MonkeyPatch, more: bytes) -> None:
    """Whether or not so much is left that the answer is held up."""
    monkeypatch.setattr(protocol, "NO_PROGRESS_S", 1.0)
    size = 20_000_000
    with ServedHere() as here:
        for number in range(2):
            with slow_reader(here, size, more) as sock:
                wait_for(lambda: any(member.transport.get_write_buffer_size() for member in here.connections._members))
                left = max(member.transport.get_write_buffer_size() for member in here.connections._members)
                assert number == 0 or left < 65_536
                wait_for(lambda: not here.connections._members)
                assert is_closed(sock)
            size = size - left + 30_000
        assert refused(here, "not_reading") == 2


def test_a_reader_that_takes_a_byte_now_and_then_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "NO_PROGRESS_S", 60.0)
    monkeypatch.setattr(protocol, "SLOW_S", 1.0)
    monkeypatch.setattr(protocol, "SLOW_BYTES", 5_000_000)
    with ServedHere() as here, slow_reader(here, 20_000_000) as sock:
        start = time.monotonic()
        while refused(here, "not_reading") == 0:
            assert time.monotonic() - start < 20
            sock.recv(3000)
            time.sleep(0.02)


# -- half-closed connections, draining -------------------------------------------------------------------------------


def test_a_half_closed_connection_is_answered() -> None:
    with ServedHere() as here, connect(here.port) as sock:
        sock.sendall(post("/slow", b"x"))
        sock.shutdown(socket.SHUT_WR)
        answers = Answers(sock)
        assert [answers.read(), answers.read(), answers.read()] == [100, 200, 0]
        assert here.num_gone == 0


def test_a_closed_connection_is_not_mistaken_for_a_half_closed_one() -> None:
    """The client closes all of it: the work for it stops long before there is an answer to send."""
    with ServedHere() as here:
        sock = connect(here.port)
        sock.sendall(post("/slow", b"x"))
        time.sleep(0.05)
        sock.close()
        start = time.monotonic()
        wait_for(lambda: here.num_gone == 1)
        assert time.monotonic() - start < 0.95  # the answer comes after a second


def test_draining_says_so_on_every_connection() -> None:
    with ServedHere() as here, connect(here.port) as idle, connect(here.port) as busy:
        answers = Answers(idle)
        idle.sendall(HEALTH)
        assert answers.read() == 200 and b"connection: close" not in answers.data
        busy.sendall(post("/slow", b"x"))
        time.sleep(0.1)
        here.on_loop(here.connections.drain)
        running = Answers(busy)
        assert running.read() == 200 and b"connection: close\r\n" in running.data and is_closed(busy)
        idle.sendall(HEALTH)
        assert answers.read() == 200 and b"connection: close\r\n" in answers.data and is_closed(idle)


# -- what heads cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    {
        "pipelined": b"GET /slow HTTP/1.1\r\nHost:x\r\n\r\n" * 60_000,
        "headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 90 + b"\r\n") * 4_000,
        "chunks": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 300_000,
    }.items(),
    ids=lambda kind: kind[0],
)
def test_what_heads_cost(kind: tuple[str, bytes]) -> None:
    """Memory and time of the loop per byte of the smallest heads, chunks and headers there are."""
    with ServedHere() as here, ExitStack() as held:
        wait_for(lambda: ask(here.port)[0] == 200)
        before, worst = resident(), 0.0
        socks = [held.enter_context(connect(here.port)) for _ in range(8)]
        for sock in socks:
            sock.setblocking(False)
        for start in range(0, len(kind[1]), 200_000):
            for sock in socks:
                try:
                    sock.send(kind[1][start : start + 200_000])
                except (BlockingIOError, ConnectionError):
                    continue
            asked = time.monotonic()
            assert ask(here.port)[0] == 200
            worst = max(worst, time.monotonic() - asked)
        assert resident() - before < 64 * 2**20
        assert worst < 2.5
