"""Several engines behind one port: the same answers, prefixes where they are cached, each started again alone.

One server with two engines for all of it; the last test stops it.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import NO_TLS, Server
from traffic import Event, Started, client_of, counting, follow, is_gone, native, socket_path

ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def pair(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(
        *("--num-replicas", "2", "--max-total-tokens", "1024", "--max-batch-total-tokens", "32768"),
        *("--admin-api-key", "secret", "--step-timeout-s", "4"),
        cache=model_cache,
        PROF_PATH=str(tmp_path_factory.mktemp("profiles")),
    )
    running.wait_for(lambda: states(running) == ["up", "up"], "both engines")
    yield running
    running.stop()


def states(server: Server) -> list[str]:
    info = httpx.get(server.url + "/info", timeout=60, verify=NO_TLS).json()
    return [replica["state"] for replica in info["replicas"]]


def engines(server: Server) -> dict[int, int]:
    """Process ids by number; sockets are in a folder each."""
    pids: dict[int, int] = {}
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            if b"text_generation_inference.engine" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                pids[int(socket_path(pid).parent.name)] = pid
    return pids


def routed(server: Server) -> list[float]:
    """Requests that went to each engine."""
    metrics = server.metrics()
    return [
        sum(value for name, value in metrics.items() if name.startswith(f'tgi_replica_requests{{replica="{number}"'))
        for number in (0, 1)
    ]


def place_of(server: Server, before: list[float]) -> int:
    """Where the one request went that was sent since."""
    changes = [now - then for now, then in zip(routed(server), before, strict=True)]
    assert sorted(changes) == [0, 1], changes
    return changes.index(1)


async def ask_all(url: str, prompts: list[str], **parameters: object) -> list[list[int]]:
    async with client_of(url) as client:
        bodies = [native(prompt, 24, details=True, **parameters)[1] for prompt in prompts]
        answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
    assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
    return [[token["id"] for token in answer.json()["details"]["tokens"]] for answer in answers]


def test_answers_are_those_of_one_engine(pair: Server, server: Server) -> None:
    prompts = [counting(number) for number in range(12)]
    before = routed(pair)
    for parameters in ({}, {"do_sample": True, "seed": 7, "temperature": 1.3}):
        assert asyncio.run(ask_all(pair.url, prompts, **parameters)) == asyncio.run(
            ask_all(server.url, prompts, **parameters)
        )
    assert all(now > then for now, then in zip(routed(pair), before, strict=True))  # both were asked


def test_the_next_turn_goes_where_its_prefix_is(pair: Server) -> None:
    messages = [{"role": "user", "content": "Tell me a long story about a fox, a crow and a piece of cheese."}]
    places: set[int] = set()
    total = 0  # tokens of the turn before
    with pair.client() as client:
        for turn in range(3):
            client.post("/generate", json={"inputs": f"Other {turn} " * 30, "parameters": {"max_new_tokens": 1}})
            before = routed(pair)
            body = {"messages": messages, "max_tokens": 40, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            places.add(place_of(pair, before))
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # All but the last blocks of the turn before, its answer included.
            assert cached >= total - 32 if turn else cached == 0, (cached, answer["usage"])
            total = answer["usage"]["total_tokens"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on, please: what then?"}]
    assert len(places) == 1


def test_choices_of_one_request_stay_together(pair: Server) -> None:
    with pair.client() as client:
        for number in range(3):
            before = routed(pair)
            body = {"prompt": f"Tale {number} of a king who", "n": 3, "max_tokens": 4, "temperature": 1.0, "seed": 3}
            assert len(client.post("/v1/completions", json=body).json()["choices"]) == 3
            assert sorted(now - then for now, then in zip(routed(pair), before, strict=True)) == [0, 3]


def test_a_profile_of_one_engine(pair: Server) -> None:
    with pair.client(headers=ADMIN) as client:
        started = client.post("/start_profile", json={"replica": 1}).json()
        assert started["replica"] == 1
        client.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 2}})
        other = client.post("/stop_profile", json={"replica": 0})
        assert (other.status_code, other.json()["error_type"]) == (409, "profiler")
        asyncio.run(ask_all(pair.url, [counting(number) for number in range(4)]))
        stopped = client.post("/stop_profile", json={"replica": 1}).json()
        assert stopped["replica"] == 1 and Path(stopped["path"]).name.startswith(f"rank0_{engines(pair)[1]}.")
        refused = client.post("/start_profile", json={"replica": 2})
        assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")


def test_an_engine_dies_alone(pair: Server) -> None:
    expected = asyncio.run(ask_all(pair.url, [counting(500)]))
    before, metrics = engines(pair), pair.metrics()

    async def run() -> tuple[list[list[Event]], list[int]]:
        started = Started(16)
        async with client_of(pair.url) as client:
            streams = [
                asyncio.create_task(follow(client, *native(counting(n), 150), started.stream())) for n in range(16)
            ]
            await started.wait(streams)
            os.kill(before[1], signal.SIGKILL)
            done, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            health = [(await client.get("/health")).status_code]
            assert "error" in done.pop().result()[-1]
            later = [follow(client, *native(counting(100 + n), 8)) for n in range(4)]  # go to the other one
            assert all("error" not in events[-1] for events in await asyncio.gather(*later))
            return await asyncio.gather(*streams), health

    streams, health = asyncio.run(run())
    assert health == [200]
    failed = [events for events in streams if "error" in events[-1]]
    assert 0 < len(failed) < 16
    for events in failed:
        last = events[-1]
        assert (last["error_type"], "the engine 1 process was killed by SIGKILL" in last["error"]) == (
            "generation",
            True,
        )
    for events in streams:
        assert events in failed or len(events) == 150
    pair.wait_for(lambda: states(pair) == ["up", "up"], "the engine's return")
    after, now = engines(pair), pair.metrics()
    assert (after[0], after[1] == before[1], is_gone(before[1])) == (before[0], False, True)
    assert now["tgi_engine_restarts"] == metrics["tgi_engine_restarts"] + 1
    assert [now[f'tgi_replica_restarts{{replica="{number}"}}'] for number in (0, 1)] == [0, 1]
    assert asyncio.run(ask_all(pair.url, [counting(500)])) == expected
    routes = routed(pair)
    asyncio.run(ask_all(pair.url, [counting(600 + number) for number in range(6)]))
    assert routed(pair)[1] > routes[1]  # it is used again
    pair.wait_for(lambda: pair.metrics()["tgi_kv_blocks_used"] == 0, "free blocks")


def test_an_engine_hangs_alone(pair: Server) -> None:
    before, hangs = engines(pair), pair.metrics()["tgi_engine_hangs"]

    async def run() -> list[list[Event]]:
        started = Started(8)
        async with client_of(pair.url) as client:
            streams = [
                asyncio.create_task(follow(client, *native(counting(n), 150), started.stream())) for n in range(8)
            ]
            await started.wait(streams)
            os.kill(before[0], signal.SIGSTOP)
            return await asyncio.gather(*streams)

    streams = asyncio.run(run())
    failed = [events[-1] for events in streams if "error" in events[-1]]
    assert 0 < len(failed) < 8
    assert all(last["error_type"] == "generation" and "engine 0 process hung" in last["error"] for last in failed)
    assert all(len(events) == 150 for events in streams if "error" not in events[-1])
    pair.wait_for(lambda: states(pair) == ["up", "up"], "the engine's return")
    assert (engines(pair)[1], engines(pair)[0] == before[0]) == (before[1], False)
    assert pair.metrics()["tgi_engine_hangs"] == hangs + 1


def test_stopping_drains_both(pair: Server) -> None:
    pids = [*engines(pair).values(), pair.children()["api"]]

    async def run() -> list[list[Event]]:
        started = Started(8)
        async with client_of(pair.url) as client:
            streams = [
                asyncio.create_task(follow(client, *native(counting(n), 200), started.stream())) for n in range(8)
            ]
            await started.wait(streams)
            pair.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

    assert [len(events) for events in asyncio.run(run())] == [200] * 8
    assert pair.process.wait(60) == 0
    assert all(is_gone(pid) for pid in pids)
