"""The product on a real Ray cluster of this machine: two replicas behind one port. In the order of the file."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
from ray_cluster import Cluster

REPLICA = "x-replica-id"


def generate(text: str, tokens: int, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True, **parameters}}


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:") and "[DONE]" not in line]


async def stream(
    http: httpx.AsyncClient, text: str, tokens: int, begun: asyncio.Future[str] | None = None
) -> tuple[str, list]:
    """The replica that answered, and the events."""
    async with http.stream("POST", "/generate_stream", json=generate(text, tokens)) as response:
        assert response.status_code == 200
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if begun is not None and not begun.done():
                begun.set_result(response.headers[REPLICA])
    return response.headers[REPLICA], events_of("\n".join(lines))


async def start_on_both(http: httpx.AsyncClient, tokens: int) -> list[asyncio.Task]:
    """Streams that have begun, one on each replica. How busy each is is known late: more are started, and left again."""
    tasks: list[tuple[str, asyncio.Task]] = []
    while len({replica for replica, _ in tasks}) < 2:
        assert len(tasks) < 10
        begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(stream(http, f"{len(tasks)} tales and", tokens, begun))
        tasks.append((await begun, task))
    kept = dict(tasks)  # the newest of each, which has most of its tokens before it
    for replica, task in tasks:
        if kept[replica] is not task:
            task.cancel()
    return list(kept.values())


def is_whole(events: list[dict[str, Any]], tokens: int) -> bool:
    ends = events[-1].get("details") or {}
    return len(events) == tokens and ends.get("generated_tokens") == tokens


def test_every_path_answers_as_a_server_of_its_own(cluster: Cluster) -> None:
    """The bytes are those of the api process that a replica runs: what it is asked directly it answers alike."""
    direct = next(iter(cluster.describe().values()))["address"]
    asked = [
        ("GET", "/health", None),
        ("GET", "/info", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/none", None),
        ("POST", "/generate", generate("The sky is", 6)),
        ("POST", "/generate_stream", generate("The sky is", 6)),
        ("POST", "/generate", {"inputs": "", "parameters": {"max_new_tokens": 0}}),
        ("POST", "/v1/completions", {"prompt": "The sky is", "max_tokens": 5, "temperature": 0}),
        ("POST", "/tokenize", {"inputs": "a b c"}),
        ("PUT", "/generate", None),
        ("OPTIONS", "/generate", None),
    ]
    changing = {"date", "x-request-id", REPLICA, "server", "transfer-encoding"}
    with cluster.client() as http, httpx.Client(base_url=direct, timeout=60) as plain:
        for method, path, body in asked:
            ours, theirs = (client.request(method, path, json=body) for client in (http, plain))
            assert ours.status_code == theirs.status_code, path
            if path not in ("/v1/completions",):  # ids and times
                assert ours.content == theirs.content, path
            else:
                assert ours.json()["choices"] == theirs.json()["choices"]
            names = [{name for name in answer.headers if name not in changing} for answer in (ours, theirs)]
            assert names[0] == names[1], path
            assert len(ours.headers.get_list("date")) == 1 and len(ours.headers.get_list("x-request-id")) == 1
            assert ours.headers["content-type" if theirs.content else "date"]


def test_metrics_tell_replicas_apart(cluster: Cluster) -> None:
    names = set(cluster.describe())
    assert len(names) == 2
    for name in ("tgi_requests_in_flight", "tgi_queue_tokens", "tgi_kv_usage_ratio"):
        assert set(cluster.metrics(name)) == names
    with cluster.client() as http:
        page = http.get("/metrics").text
    assert page.count("# TYPE tgi_requests_in_flight ") == 1
    assert not [line for line in page.splitlines() if line and line[0] != "#" and 'replica="' not in line]


def test_cards_of_a_replica_are_handed_to_its_processes(cluster: Cluster) -> None:
    seen = []
    for replica in cluster.describe().values():
        variables = Path(f"/proc/{replica['launcher']}/environ").read_bytes().split(b"\0")
        seen.append(dict(pair.split(b"=", 1) for pair in variables if b"=" in pair)[b"CUDA_VISIBLE_DEVICES"])
    assert sorted(seen) == [b"0,1", b"2,3"]


def test_a_conversation_stays_where_its_prefix_is(cluster: Cluster) -> None:
    def take_turn(http: httpx.Client, chat: list[dict[str, str]]) -> tuple[str, int]:
        """The replica that answered, and how many tokens of the prompt it had."""
        response = http.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 4, "temperature": 0})
        answer = response.raise_for_status().json()
        text = answer["choices"][0]["message"]["content"]
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on"}]
        return response.headers[REPLICA], answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)

    chats: list[list[dict[str, str]]] = []
    served: list[str] = []
    with cluster.client() as http:
        while len(set(served)) < 2:  # first turns go to whoever is believed to hold least, which is known late
            assert len(chats) < 8
            rules = f"You are clerk number {len(chats)}. " + f"Rule of {len(chats)}: be brief. " * 40
            chats.append([{"role": "system", "content": rules}, {"role": "user", "content": "Hello"}])
            replica, cached = take_turn(http, chats[-1])
            assert cached < 100
            served.append(replica)
        for _ in range(2):
            for chat, replica in zip(chats, served, strict=True):
                again, cached = take_turn(http, chat)
                assert again == replica and cached > 200


def test_a_client_that_leaves_ends_its_generation(cluster: Cluster) -> None:
    with cluster.client() as http:
        with http.stream("POST", "/generate_stream", json=generate("Count on and on:", 1500)) as response:
            lines = response.iter_lines()
            first = next(lines)
            assert response.status_code == 200, first
            assert sum(cluster.metrics("tgi_requests_in_flight").values()) == 1
        gone = time.monotonic()
        cluster.wait_for(lambda: not sum(cluster.metrics("tgi_requests_in_flight").values()), "the end", 10)
        assert time.monotonic() - gone < 5


def test_more_than_both_can_take_is_refused_and_the_rest_answered(cluster: Cluster) -> None:
    async def flood() -> list[httpx.Response]:
        async with cluster.async_client() as http:
            calls = (http.post("/generate", json=generate(f"Number {number}", 24)) for number in range(24))
            return await asyncio.gather(*calls)

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer.status_code == 429]
    accepted = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(accepted) == 24
    assert len(accepted) >= 10  # six on each, less the place that is kept for other callers
    assert len({answer.headers[REPLICA] for answer in accepted}) == 2
    assert {answer.text for answer in refused} == {'{"error":"Model is overloaded","error_type":"overloaded"}'}
    assert all(answer.headers["retry-after"] for answer in refused)


def test_a_killed_replica_loses_only_streams_that_had_begun(cluster: Cluster) -> None:
    """Streams end with an error event, whole answers come from the other one, and the replica comes back."""

    async def run() -> tuple[list[tuple[str, list]], list[httpx.Response]]:
        async with cluster.async_client() as http:
            streams = await start_on_both(http, 1200)  # still under way when the replica is killed
            whole = [asyncio.create_task(http.post("/generate", json=generate(f"No {n}", 60))) for n in range(3)]
            await asyncio.sleep(0.3)
            os.kill(victim["pid"], signal.SIGKILL)
            return list(await asyncio.gather(*streams)), list(await asyncio.gather(*whole))

    replicas = cluster.describe()
    victim = next(iter(replicas.values()))
    streams, whole = asyncio.run(run())
    assert [answer.status_code for answer in whole] == [200] * 3
    for replica, events in streams:
        if replica == victim["name"]:
            assert events[-1].get("error_type") == "generation", (len(events), events[-1])
            assert "replica" in events[-1]["error"]
        else:
            assert is_whole(events, 1200)
    assert {replica for replica, _ in streams} == set(replicas)
    cluster.wait_for(lambda: not Path(f"/proc/{victim['launcher']}").exists(), "the end of the launcher", 10)
    others = set(replicas) - {victim["name"]}
    cluster.wait_for(lambda: len(cluster.describe().keys() - replicas.keys()) == 1, "another replica", 90)
    assert cluster.describe().keys() >= others


def test_scaling_down_and_up_loses_nothing(cluster: Cluster) -> None:
    async def down() -> list[tuple[str, list]]:
        async with cluster.async_client() as http:
            tasks = await start_on_both(http, 300)
            assert await asyncio.to_thread(cluster.deploy, min_replicas=1) is True
            return list(await asyncio.gather(*tasks))

    async def up() -> tuple[int, set[str]]:
        """Requests, a few at a time, until there are two replicas again and both have answered."""
        seen: set[str] = set()
        number = 0
        end = time.monotonic() + 150  # a replica starts meanwhile

        async def keep_asking(http: httpx.AsyncClient) -> None:
            nonlocal number
            while time.monotonic() < end and len(seen) < 2:
                number += 1
                replica, events = await stream(http, f"Question {number}", 20)
                assert is_whole(events, 20)
                seen.add(replica)

        async with cluster.async_client() as http:
            await asyncio.gather(*(keep_asking(http) for _ in range(5)))
        return number, seen

    streams = asyncio.run(down())
    assert len({replica for replica, _ in streams}) == 2
    assert all(is_whole(events, 300) for _, events in streams)
    cluster.wait_for_running(1)
    _, seen = asyncio.run(up())
    assert len(seen) == 2


def test_a_server_that_cannot_start_is_told_in_a_line(cluster: Cluster) -> None:
    answer = cluster.deploy(quantize="nonsense", min_replicas=1, max_replicas=1)
    assert "the server cannot start (status 2): error: " in answer and "nonsense" in answer


def test_a_stop_lets_answers_end_and_refuses_new_ones(cluster: Cluster) -> None:
    async def run() -> tuple[list[httpx.Response], list[dict[str, Any]]]:
        async with cluster.async_client() as http:
            begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(stream(http, "Once upon a time", 400, begun))
            await begun
            cluster.tell_to_stop()
            while (health := await http.get("/health")).status_code == 200:
                assert not task.done()
                await asyncio.sleep(0.1)
            late = await http.post("/generate", json=generate("Too late", 4))
            return [health, late], (await task)[1]

    assert cluster.deploy(min_replicas=1, max_replicas=1) is True
    refused, events = asyncio.run(run())
    assert [answer.status_code for answer in refused] == [503, 503]
    assert "shutting down" in refused[1].json()["error"]
    assert is_whole(events, 400)
    assert cluster.stop() == 0
