"""One model on two machines, which here are two loopback addresses: a launcher with the port, and one that follows it."""

import base64
import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from recorded_http import FILE, ask, check
from serving import Server, free_port
from traffic import is_gone
from vision_oracle import draw, make_oracle

TOKEN = "a secret of both"


@contextmanager
def start_both(*words: str, **about: Any) -> Iterator[tuple[Server, Server]]:
    together = ("--nnodes", "2", "--num-shard", "2", "--master-addr", "127.0.0.2", "--master-port", str(free_port()))
    limits = ("--device", "cpu", "--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    first, second = (
        Server(*limits, *together, *words, "--node-rank", rank, wait=False, RANK_TOKEN=TOKEN, **about)
        for rank in ("0", "1")
    )
    try:
        first.wait_until_serving()
        yield first, second
    finally:
        first.stop()
        second.stop()


@pytest.fixture(scope="module")
def machines(model_cache: Path) -> Iterator[tuple[Server, Server]]:
    with start_both(cache=model_cache) as both:
        yield both


def rank_of(server: Server) -> int | None:
    """The process of the rank that is on the second machine, the only child of its launcher; None: there is none."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    found = [int(pid) for task in tasks for pid in task.read_text().split()]
    return found[0] if found else None


def test_answers_are_those_of_one_machine(machines: tuple[Server, Server]) -> None:
    recorded = json.loads(FILE.read_text())
    with machines[0].client() as client:
        for name in ("generate", "chat"):
            check(ask(client, name), recorded[name])
        assert client.get("/info").json()["num_shard"] == 2


def test_what_listens_does_so_at_the_address_that_was_said(machines: tuple[Server, Server]) -> None:
    first, second = machines
    allowed = {"0100007F", "0200007F"}  # 127.0.0.1 and 127.0.0.2
    assert listening(first.children()["engine"]) <= allowed
    rank = rank_of(second)
    assert rank is not None and listening(rank) <= allowed


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, as the kernel writes them."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_a_machine_that_is_lost_comes_back(machines: tuple[Server, Server]) -> None:
    first, second = machines
    rank = rank_of(second)
    assert rank is not None
    os.kill(rank, signal.SIGKILL)
    with first.client() as client:
        first.wait_for(lambda: client.get("/health").status_code != 200, "the loss")
        first.wait_for(lambda: client.get("/health").status_code == 200, "another group", timeout_s=90)
        check(ask(client, "generate"), json.loads(FILE.read_text())["generate"])
    assert is_gone(rank) and rank_of(second) not in (None, rank)


def test_both_end_with_the_first(machines: tuple[Server, Server]) -> None:
    first, second = machines
    rank = rank_of(second)
    assert rank is not None
    assert first.stop() == 0, first.log[-2000:]
    second.wait_for(lambda: is_gone(rank), "the end of the other rank", timeout_s=20)


def test_pictures_go_to_the_other_machine(tmp_path: Path) -> None:
    """The second has no folder of pixels: they come on the channel of its orders. Were they others, tokens would be."""
    oracle = make_oracle("llava_next", tmp_path / "model")
    with (
        start_both("--model-id", str(oracle.folder), "--dtype", "float32", cache=tmp_path / "cache") as (first, _),
        first.client() as client,
    ):
        found: list[list[int]] = []
        for width, height in ((90, 31), (31, 90)):
            picture = draw(width, height, seed=width)
            file = io.BytesIO()
            picture.save(file, "PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            body = {"inputs": f"![]({url})What is this?\n\n", "parameters": {"max_new_tokens": 8, "details": True}}
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            found.append([token["id"] for token in answer.json()["details"]["tokens"]])
            assert found[-1] == oracle.generate([picture, "What is this?\n\n"], 8).token_ids
        assert found[0] != found[1]
