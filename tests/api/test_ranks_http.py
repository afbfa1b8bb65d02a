"""The launcher with `--num-shard 2`: the answers of one rank, nothing else listens, and a rank that dies in mid-stream."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from events import read_events
from recorded_http import CASES, FILE, ask, check
from serving import Server
from traffic import is_gone


@pytest.fixture(scope="module")
def split(model_cache: Path) -> Iterator[Server]:
    limits = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    server = Server("--device", "cpu", "--num-shard", "2", *limits, cache=model_cache)
    yield server
    ranks = ranks_of(server)
    assert server.stop() == 0, server.log[-3000:]
    assert all(map(is_gone, ranks))


def ranks_of(server: Server) -> list[int]:
    """Processes of further ranks, children of the engine process."""
    engine = server.children().get("engine")
    tasks = Path(f"/proc/{engine}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def test_answers_are_those_of_one_rank(split: Server) -> None:
    recorded = json.loads(FILE.read_text())
    with split.client() as client:
        for name in CASES:
            check(ask(client, name), recorded[name])


def test_nothing_listens_but_http(split: Server) -> None:
    """Beyond this machine's own addresses."""
    inodes = {
        link.removeprefix("socket:[").removesuffix("]")
        for pid in (split.children()["engine"], *ranks_of(split))
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if (link := os.readlink(fd)).startswith("socket:")
    }
    listening: list[str] = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        listening += [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    loopback = ("0100007F", "00000000000000000000000001000000")
    assert listening and all(address in loopback for address in listening)


def test_a_rank_dies_in_mid_stream(split: Server) -> None:
    (rank,) = ranks_of(split)
    body = {"inputs": "Count: one, two,", "parameters": {"max_new_tokens": 900}}
    with split.client() as client, client.stream("POST", "/generate_stream", json=body) as stream:
        chunks = stream.iter_bytes()
        data = next(chunks)
        os.kill(rank, signal.SIGKILL)
        killed = time.monotonic()
        data += b"".join(chunks)
        assert time.monotonic() - killed < 2
    last = read_events(data)[-1]
    assert (last["error_type"], "a step failed on the device" in last["error"]) == ("generation", True)
    split.wait_for(lambda: ranks_of(split) not in ([], [rank]), "another group of ranks")
    with split.client() as client:
        split.wait_for(lambda: client.get("/health").status_code == 200, "the engine's return")
        check(ask(client, "generate"), json.loads(FILE.read_text())["generate"])
    assert "engine failed: a step failed on the device: rank 1 was killed by SIGKILL" in split.log
    # Nor does a rank outlive the engine, however that ends.
    (rank,) = ranks_of(split)
    os.kill(rank, signal.SIGSTOP)
    os.kill(split.children()["engine"], signal.SIGKILL)
    split.wait_for(lambda: is_gone(rank), "the end of its rank", timeout_s=2)
