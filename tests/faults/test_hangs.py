"""Processes that live and do nothing, steps that never end: seen within the limit, told to clients, got over.

Each server here calls four seconds without progress a hang, and faults are put into a file that it reads as it runs.
Most of the time is waiting: there are two servers, and something happens to both at once.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import NO_TLS, Server
from traffic import (
    DONE,
    Event,
    chat,
    client_of,
    counting,
    follow,
    is_gone,
    native,
    open_files,
    socket_path,
    start_lasting,
)

LIMIT_S = 4.0  # far above what a step takes here when others use the machine as well
SLACK_S = 8.0  # for a loaded machine; without the watch nothing ends at all
REQUEST_TIMEOUT_S = 9.0
PROMPT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 12, "details": True}}


class Victim:
    """A server, its faults, and what it had before anything happened to it."""

    def __init__(self, cache: Path, folder: Path) -> None:
        self.folder = folder / "tmp"
        self.folder.mkdir()
        self.faults = folder / "faults"
        self.faults.touch()
        self.server = Server(
            *("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768"),
            *("--step-timeout-s", str(LIMIT_S), "--request-timeout-s", str(REQUEST_TIMEOUT_S)),
            cache=cache,
            TMPDIR=str(self.folder),
            TGI_FAILPOINTS=f"@{self.faults}",
        )
        self.expected = self.greedy()
        self.files = self.count_files()

    def greedy(self) -> list[int]:
        answer = httpx.post(self.server.url + "/generate", json=PROMPT, timeout=60, verify=NO_TLS)
        assert answer.status_code == 200, answer.text
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    def status(self, path: str = "/health") -> int:
        """0: nobody answers."""
        try:
            return httpx.get(self.server.url + path, timeout=1, verify=NO_TLS).status_code
        except httpx.TransportError:
            return 0

    def wait_for_status(self, status: int, timeout_s: float = 60) -> None:
        self.server.wait_for(lambda: self.status() == status, f"/health to be {status}", timeout_s)

    def count_files(self) -> list[int]:
        """Open ones, of each process; connections that end are not counted."""
        pids = [self.server.process.pid, *(pid for _, pid in sorted(self.server.children().items()))]
        return [sum(not name.startswith("socket:") for name in open_files(pid)) for pid in pids]

    def assert_recovered(self, before: dict[str, int], restarted: set[str]) -> None:
        """It serves as before, with new processes in place of those that hung, and nothing of them is left."""
        self.wait_for_status(200)
        assert self.greedy() == self.expected
        after = self.server.children()
        assert {role for role in after if after[role] != before[role]} == restarted
        assert all(is_gone(before[role]) for role in restarted)
        assert self.status("/v2/health/live") == 200
        self.server.wait_for(lambda: self.count_files() == self.files, "files to be closed", 10)
        (folder,) = self.folder.glob("tgi-*")
        assert len([*folder.iterdir()]) == 4  # lock, socket and two heartbeats
        self.server.wait_for(lambda: self.server.metrics()["tgi_requests_in_flight"] == 0, "requests to end", 10)


@pytest.fixture(scope="module")
def victims(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Victim]]:
    """Two, because a process that fails often is started again later each time."""
    folders = [tmp_path_factory.mktemp("victim") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda folder: Victim(model_cache, folder), folders)]
    yield found
    for victim in found:
        assert victim.server.stop() == 0, victim.server.log[-3000:]
        assert not [*victim.folder.glob("tgi-*")]
        assert "Traceback" not in victim.server.log


def at_once(victims: list[Victim], first: Callable[[Victim], None], second: Callable[[Victim], None]) -> None:
    """Each on a victim of its own."""

    def run(victim: Victim, work: Callable[[Victim], None]) -> None:
        victim.wait_for_status(200)
        work(victim)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, victim, work) for victim, work in zip(victims, (first, second), strict=True)]:
            done.result()


async def streams_until_error(victim: Victim, harm: str) -> tuple[list[list[Event]], list[httpx.Response], float]:
    """Streams and whole answers while `harm` (a fault, or a signal to a role) happens; how long they took to end."""
    async with client_of(victim.server.url) as client:
        streams, whole = await start_lasting(client)
        begin = time.monotonic()
        if harm.startswith("stop "):
            os.kill(victim.server.children()[harm.removeprefix("stop ")], signal.SIGSTOP)
        else:
            victim.faults.write_text(harm)
        await asyncio.wait([*streams, *whole])
        victim.faults.write_text("")
        errors = [error for task in (*streams, *whole) if (error := task.exception())]
        if errors:
            assert len(errors) == 6
            raise errors[0]
        return [task.result() for task in streams], [task.result() for task in whole], time.monotonic() - begin


# -- the engine ----------------------------------------------------------------------------------------------------


STEP = "a step has been running"


@pytest.mark.parametrize(
    "harms",
    [
        (("stop engine", "stopped"), ("engine.compute=hang", STEP)),  # the second on the thread of the device
        (("engine.plan=hang", STEP), ("engine.send=hang", STEP)),
    ],
)
def test_an_engine_that_hangs(victims: list[Victim], harms: tuple[tuple[str, str], tuple[str, str]]) -> None:
    first, second = harms
    at_once(
        victims, lambda victim: check_hung_engine(victim, *first), lambda victim: check_hung_engine(victim, *second)
    )


def check_hung_engine(victim: Victim, harm: str, words: str) -> None:
    before, metrics = victim.server.children(), victim.server.metrics()
    streams, (whole_native, whole_chat), took_s = asyncio.run(streams_until_error(victim, harm))
    assert took_s < LIMIT_S + SLACK_S
    for number, events in enumerate(streams):
        if number % 2:
            assert (events[-1]["error_type"], words in events[-1]["error"]) == ("generation", True), events[-1]
        else:
            assert (events[-2]["error"]["type"], words in events[-2]["error"]["message"]) == ("server_error", True)
            assert events[-1] is DONE
    assert (whole_native.status_code, whole_native.json()["error_type"]) == (424, "generation")
    assert (whole_chat.status_code, whole_chat.json()["error"]["type"]) == (500, "server_error")
    victim.assert_recovered(before, {"engine"})
    after = victim.server.metrics()
    for name in ("tgi_engine_hangs", "tgi_engine_restarts"):
        assert after[name] == metrics[name] + 1


def check_idle_engine_that_is_stopped(victim: Victim) -> None:
    """Health is red before the limit is over for requests; alive all the while; and green again if it only paused."""
    before = victim.server.children()
    os.kill(before["engine"], signal.SIGSTOP)
    victim.wait_for_status(503, LIMIT_S + SLACK_S)
    assert victim.status("/v2/health/live") == 200
    assert victim.status("/v2/health/ready") == 503
    refused = httpx.post(victim.server.url + "/generate", json=PROMPT, timeout=60, verify=NO_TLS)
    assert (refused.status_code, refused.json()["error_type"]) == (503, "unavailable")
    victim.assert_recovered(before, {"engine"})


# -- the api process -----------------------------------------------------------------------------------------------


def check_hung_api(victim: Victim, harm: str) -> None:
    """Connections break, which is all that a process can say that does not run; the next ones are served."""
    before, metrics = victim.server.children(), victim.server.metrics()
    begin = time.monotonic()
    with pytest.raises(httpx.TransportError):
        asyncio.run(streams_until_error(victim, harm))
    assert time.monotonic() - begin < LIMIT_S + SLACK_S
    victim.assert_recovered(before, {"api"})
    after = victim.server.metrics()
    assert (after["tgi_api_hangs"], after["tgi_api_restarts"]) == (
        metrics["tgi_api_hangs"] + 1,
        metrics["tgi_api_restarts"] + 1,
    )
    assert after["tgi_engine_restarts"] == metrics["tgi_engine_restarts"]


def test_an_api_process_that_is_stopped_and_an_idle_engine_that_is(victims: list[Victim]) -> None:
    at_once(victims, lambda victim: check_hung_api(victim, "stop api"), check_idle_engine_that_is_stopped)


def test_an_api_process_that_hangs(victims: list[Victim]) -> None:
    at_once(
        victims,
        lambda victim: check_hung_api(victim, "api.deliver=hang"),
        lambda victim: check_hung_api(victim, "api.write=hang"),
    )


# -- requests past their deadline ----------------------------------------------------------------------------------


def test_requests_past_their_deadline_end_with_an_error(victims: list[Victim]) -> None:
    at_once(victims, check_slow_streams, check_worker_threads_that_hang)


def check_worker_threads_that_hang(victim: Victim) -> None:
    """Each ends the one request that waits for it, and no other."""
    before = victim.server.children()
    victim.faults.write_text("api.validate=delay:30@1; engine.compile=delay:30@1")
    long = {"inputs": "word " * 900}  # enough for a worker thread
    constrained = {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "ab+c"}}}

    async def run() -> tuple[list[httpx.Response], list[int]]:
        async with client_of(victim.server.url) as client:
            stuck: list[asyncio.Task[httpx.Response]] = []
            for body in (long, constrained):
                stuck.append(asyncio.create_task(client.post("/generate", json=body)))
                await asyncio.sleep(0.5)
            others = [await client.post("/generate", json=PROMPT) for _ in range(2)]
            assert not any(task.done() for task in stuck)
            return await asyncio.gather(*stuck), [other.status_code for other in others]

    answers, others = asyncio.run(run())
    victim.faults.write_text("")
    assert others == [200, 200]
    for answer in answers:
        assert answer.status_code == 504
        assert answer.json() == {"error": "the request took longer than 9 s", "error_type": "timeout"}
    victim.assert_recovered(before, set())


def check_slow_streams(victim: Victim) -> None:
    victim.faults.write_text("engine.plan=delay:0.3")

    async def run() -> list[list[Event]]:
        async with client_of(victim.server.url) as client:
            return await asyncio.gather(
                follow(client, *native(counting(1), 900)),
                follow(client, *chat(counting(1), 900)),
                follow(client, "/v1/completions", {"prompt": counting(1), "max_tokens": 900, "stream": True}),
            )

    native_events, chat_events, completion_events = asyncio.run(run())
    victim.faults.write_text("")
    assert len(native_events) > 3
    assert native_events[-1] == {"error": "the request took longer than 9 s", "error_type": "timeout"}
    for events in (chat_events, completion_events):
        error = events[-2]["error"]
        assert (error["type"], error["code"], error["http_status_code"]) == ("server_error", "timeout", 504)
        assert events[-1] is DONE
    victim.server.wait_for(lambda: victim.server.metrics()["tgi_batch_current_size"] == 0, "the engine to be free", 10)
    assert victim.server.metrics()['tgi_request_failure{err="timeout"}'] >= 3


# -- what is no hang -----------------------------------------------------------------------------------------------

SLOW_PLACES = (
    *("engine.receive", "engine.plan", "engine.launch", "engine.compute", "engine.apply", "engine.encode"),
    *("engine.send", "api.validate", "api.submit", "api.deliver", "api.write"),
)


def test_slow_is_not_hung(victims: list[Victim]) -> None:
    """At every place, one after the other."""
    victim = victims[1]
    victim.wait_for_status(200)
    before = victim.server.children()
    victim.faults.write_text("; ".join(f"{place}=delay:{LIMIT_S / 32}@1" for place in SLOW_PLACES))
    events = asyncio.run(_follow_one(victim))
    assert len(events) == 12 and events[-1]["generated_text"]
    victim.faults.write_text("")
    victim.assert_recovered(before, set())


async def _follow_one(victim: Victim) -> list[Event]:
    async with client_of(victim.server.url) as client:
        return await follow(client, *native(PROMPT["inputs"], 12))


def test_a_launcher_that_was_away_blames_nobody(victims: list[Victim]) -> None:
    """Stopped alone, its processes serve on; stopped together, as a machine that sleeps, all go on."""
    at_once(
        victims,
        lambda victim: check_launcher_that_was_away(victim, ("launcher",)),
        lambda victim: check_launcher_that_was_away(victim, ("launcher", "engine", "api")),
    )


def check_launcher_that_was_away(victim: Victim, roles: tuple[str, ...]) -> None:
    before, metrics = victim.server.children(), victim.server.metrics()
    pids = {**before, "launcher": victim.server.process.pid}
    for role in roles:
        os.kill(pids[role], signal.SIGSTOP)
    try:
        if roles == ("launcher",):
            assert victim.greedy() == victim.expected
        time.sleep(LIMIT_S + 1)
        if roles == ("launcher",):
            assert victim.greedy() == victim.expected
    finally:
        for role in reversed(roles):
            os.kill(pids[role], signal.SIGCONT)
    time.sleep(1)  # it looks several times
    victim.assert_recovered(before, set())
    assert victim.server.metrics()["tgi_engine_hangs"] == metrics["tgi_engine_hangs"]
    assert socket_path(before["engine"]).exists()
