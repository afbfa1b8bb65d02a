"""Machines that come to machine 0: who is let in, who is not, and what is noticed. No process and no torch."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine import machines
from text_generation_inference.engine.machines import (
    Machines,
    Refused,
    call,
    find_interface,
    has_ended,
    ranks_of,
)
from text_generation_inference.errors import StartError


def config_of(machine: int = 0, **settings: Any) -> ServerConfig:
    given: dict[str, Any] = {"nnodes": 3, "num_shard": 6, "master_addr": "127.0.0.2", "rank_token": "geheim"}
    return ServerConfig(**{**given, "node_rank": machine, "master_port": PORT, **settings})


PORT = machines.free_port("127.0.0.2")


class Gathering:
    """Machine 0, which waits in a thread."""

    def __init__(self) -> None:
        self.machines = Machines(config_of())
        self.links: dict[int, socket.socket] = {}
        self.counts: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 5
        while not self.counts and time.monotonic() < deadline:
            time.sleep(0.005)

    def _run(self) -> None:
        self.links = self.machines.gather(lambda stage, done, total: self.counts.append(done))

    def is_done(self, seconds: float = 5.0) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    found = Gathering()
    yield found
    if not found.is_done(0):  # let it end
        streams = [stream for machine in (1, 2) for stream in arrive(machine)]
        assert found.is_done()
        for stream in streams:
            stream.close()
    found.machines.end()
    for link in found.links.values():
        link.close()


def arrive(machine: int) -> list[socket.socket]:
    """The connections of a whole machine: its own, then those of its ranks."""
    config, session = config_of(machine), machines.new_session()
    return [call(config, session), *(call(config, session, rank) for rank in ranks_of(config, machine))]


def test_ranks_of_machines() -> None:
    assert [list(ranks_of(config_of(), machine)) for machine in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_all_come_and_are_told_of_the_end(gathering: Gathering) -> None:
    streams = {machine: arrive(machine) for machine in (2, 1)}  # in any order
    assert gathering.is_done()
    assert sorted(gathering.links) == [2, 3, 4, 5]
    gathering.links[3].sendall(b"order")
    assert streams[1][2].recv(5) == b"order"
    with pytest.raises(OSError):  # nothing listens any more
        call(config_of(1), "x")
    assert not has_ended(streams[1][0], 0.05)
    gathering.machines.end()
    assert has_ended(streams[1][0], 1) and has_ended(streams[2][0], 1)


def test_a_machine_that_leaves_before_all_are_there_may_come_again(gathering: Gathering) -> None:
    first = arrive(1)
    for stream in first:
        stream.close()
    other = arrive(2)
    assert not gathering.is_done(0.6)
    again = arrive(1)
    assert gathering.is_done()
    for stream in (*other, *again):
        stream.close()


def test_ranks_of_a_machine_that_has_come_again_are_not_mixed(gathering: Gathering) -> None:
    old = machines.new_session()
    left = call(config_of(1), old)
    again = arrive(1)
    assert has_ended(left, 1)
    with pytest.raises(Refused, match="has come again"):
        call(config_of(1), old, 2)
    other = arrive(2)
    assert gathering.is_done() and not has_ended(again[0], 0.05)
    for stream in (left, *again, *other):
        stream.close()


@pytest.mark.parametrize(
    ("settings", "rank", "words"),
    [
        ({"rank_token": "geraten"}, None, "another `rank_token`"),
        ({"rank_token": None}, None, "another `rank_token`"),
        ({"node_rank": 3}, None, "machine 0 has `nnodes` 3, this one is `node_rank` 3"),
        ({"node_rank": 0}, None, "this one is `node_rank` 0"),
        ({"node_rank": 1}, 5, "has no rank 5 there"),
    ],
)
def test_who_is_refused(gathering: Gathering, settings: dict[str, Any], rank: int | None, words: str) -> None:
    with pytest.raises(Refused, match=words):
        call(config_of(**{"node_rank": 1, **settings}), "s", rank)
    assert gathering.links == {}


@pytest.mark.usefixtures("gathering")
def test_another_version_is_refused() -> None:
    with pytest.raises(Refused, match="this one 0.0.1"):
        call(config_of(1), "s", version="0.0.1")


def test_strangers_keep_nobody_waiting(gathering: Gathering) -> None:
    """Some say nothing, some say anything, one claims to have a lot to say."""
    strangers = [socket.create_connection(("127.0.0.2", PORT)) for _ in range(12)]
    for stranger in strangers[4:]:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    strangers[1].sendall(bytes(32) + (1 << 31).to_bytes(4, "little"))
    began = time.monotonic()
    streams = [*arrive(1), *arrive(2)]
    assert gathering.is_done() and time.monotonic() - began < 3
    for stream in (*strangers, *streams):
        stream.close()


def test_whoever_answers_must_know_the_token_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]

        def answer() -> None:
            stream, _ = impostor.accept()
            with stream:
                stream.sendall(bytes(32))
                stream.recv(4096)
                stream.sendall(bytes(32))
                stream.recv(1)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(Refused, match="does not know `rank_token`"):
            call(config_of(1, master_addr="127.0.0.1", master_port=port), "s")
        thread.join(5)


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        taken = config_of(master_port=other.getsockname()[1])
        with pytest.raises(StartError, match="Address already in use; choose another `master_port`"):
            Machines(taken).gather(lambda *_: None)
    with pytest.raises(StartError, match="cannot be found"):
        Machines(config_of(master_addr="no-such-host.invalid")).gather(lambda *_: None)


def test_the_interface_of_an_address() -> None:
    assert find_interface("127.0.0.2") == "lo"
    assert find_interface("no-such-host.invalid") is None
