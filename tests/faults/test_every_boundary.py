"""A fault at every boundary between a plan and the client: typed errors for those concerned, the right text for all others,
and a server that serves again.

Each fault happens once. What may come back is the right text or a typed error, never silence, never other text.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from serving import NO_TLS, Server
from traffic import Event, client_of, counting, follow, native, running

from text_generation_inference.failpoints import PLACES

# Grammars are compiled beside the loop, and only for requests that have one.
ENGINE = [place for place in PLACES if place.startswith("engine.") and place != "engine.compile"]
PROMPT = native(counting(3), 30)
OTHER = native(counting(40), 60)
PATIENCE_S = 60


def faults_of(long: bool) -> list[str]:
    """As many as one server survives without being given up, in each list."""
    actions = ("raise", "memory", "kill") if long else ("raise",)
    # The second time: in the middle of what two requests do.
    return [f"{place}={action}@2" for action in actions for place in ENGINE]


class Faulty:
    """A server whose faults a test turns on and off."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server, self._file = server, file

    @contextmanager
    def asked(self, faults: str) -> Iterator[None]:
        self._file.write_text(faults)
        try:
            yield
        finally:
            self._file.write_text("")

    def wait_until_healthy(self) -> None:
        def healthy() -> bool:
            try:
                return httpx.get(self.server.url + "/health", timeout=10, verify=NO_TLS).status_code == 200
            except httpx.HTTPError:
                return False

        self.server.wait_for(healthy, "the server to be healthy again")


@contextmanager
def faulty(tmp_path: Path, cache: Path) -> Iterator[Faulty]:
    file = tmp_path / "failpoints"
    file.write_text("")
    arguments = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "8192")
    with running(*arguments, cache=cache, TGI_FAILPOINTS=f"@{file}") as server:
        yield Faulty(server, file)


async def tokens_or_error(client: httpx.AsyncClient, request: tuple[str, Event]) -> list[int] | str:
    """The tokens of a stream, or the kind of error that ended it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            events = await follow(client, *request)
    except httpx.HTTPError as error:  # its process is gone
        return type(error).__name__
    for event in events:
        if "error" in event:
            assert event["error_type"] in ("generation", "unavailable", "internal"), event
            return event["error_type"]
    return [event["token"]["id"] for event in events]


async def together(url: str, *requests: tuple[str, Event]) -> list[list[int] | str]:
    async with client_of(url) as client:
        return list(await asyncio.gather(*(tokens_or_error(client, request) for request in requests)))


def alone(url: str, *requests: tuple[str, Event]) -> list[Any]:
    return [asyncio.run(together(url, request))[0] for request in requests]


def test_engine(tmp_path: Path, model_cache: Path, long_run: bool) -> None:
    """Every other fault on a server of its own: much of the time is one process waiting for another that starts."""
    every = faults_of(long_run)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(check_faults, every[part::2], tmp_path / str(part), model_cache) for part in (0, 1)]:
            done.result()


def check_faults(faults: list[str], folder: Path, cache: Path) -> None:
    folder.mkdir()
    for number in range(0, len(faults), 3):  # a server is given up after six failures in a row
        with faulty(folder, cache) as one:
            right = alone(one.server.url, PROMPT, OTHER)
            assert all(isinstance(answer, list) for answer in right), right
            for fault in faults[number : number + 3]:
                with one.asked(fault):
                    answers = asyncio.run(together(one.server.url, PROMPT, OTHER))
                for answer, expected in zip(answers, right, strict=True):
                    assert isinstance(answer, str) or answer == expected, fault
                assert any(isinstance(answer, str) for answer in answers), f"{fault} did not happen"
                one.wait_until_healthy()
                assert alone(one.server.url, PROMPT, OTHER) == right, fault
            assert one.server.stop() == 0, one.server.log[-3000:]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Faulty]:
    with faulty(tmp_path_factory.mktemp("faults"), model_cache) as server:
        yield server
        assert server.server.stop() == 0, server.server.log[-3000:]


@pytest.mark.parametrize("place", ["api.submit", "api.write"])
def test_one_request_can_only_fail_itself(place: str, one: Faulty) -> None:
    right = alone(one.server.url, PROMPT, OTHER)
    pids = one.server.children()
    with one.asked(f"{place}=raise@2"):
        answers = asyncio.run(together(one.server.url, PROMPT, OTHER))
    failed = [answer for answer, expected in zip(answers, right, strict=True) if answer != expected]
    assert failed == ["internal"], answers
    assert one.server.children() == pids, "a process was lost"
    assert alone(one.server.url, PROMPT, OTHER) == right


def test_every_delay_only_delays(one: Faulty) -> None:
    right = alone(one.server.url, PROMPT, OTHER)
    for place in PLACES:
        with one.asked(f"{place}=delay:0.2@2"):
            assert asyncio.run(together(one.server.url, PROMPT, OTHER)) == right, place


def test_events_that_cannot_be_delivered(one: Faulty) -> None:
    """What was in a message that cannot be read is not known: those in flight end with an error, and nobody else."""
    right = alone(one.server.url, PROMPT)
    pids = one.server.children()
    with one.asked("api.deliver=raise@3"):
        answers = asyncio.run(together(one.server.url, PROMPT))
    assert answers == ["generation"]
    one.server.wait_for(lambda: not one.server.metrics().get("tgi_batch_current_size"), "the engine to drop it")
    assert alone(one.server.url, PROMPT) == right
    assert one.server.children() == pids, "a process was lost"
