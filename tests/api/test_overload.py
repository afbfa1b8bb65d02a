"""More than the server takes: refused at once with the reference's bodies, while those inside go on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import NO_TLS, Server
from traffic import DONE, Event, Started, chat, client_of, counting, follow, native, stopped

LIMIT = 4
QUEUED_TOKENS = 300
REFUSED = {"error": "Model is overloaded", "error_type": "overloaded"}


@pytest.fixture(scope="module")
def small(model_cache: Path) -> Iterator[Server]:
    limits = ("--max-concurrent-requests", str(LIMIT), "--max-queued-tokens", str(QUEUED_TOKENS))
    server = Server(*limits, "--max-total-tokens", "1024", "--max-batch-total-tokens", "8192", cache=model_cache)
    yield server
    assert server.stop() == 0, server.log[-3000:]


def assert_refused(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.json()) == (429, REFUSED)
    assert int(answer.headers["retry-after"]) > 0


def assert_refused_openai(answer: httpx.Response) -> None:
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["message"], error["type"], error["code"]) == ("Model is overloaded", "rate_limit_error", "overloaded")
    assert int(answer.headers["retry-after"]) > 0


async def knock_everywhere(client: httpx.AsyncClient) -> None:
    """Every route that generates refuses in its own way."""
    assert_refused(await client.post("/generate", json={"inputs": "Hi"}))
    assert_refused(await client.post("/", json={"inputs": "Hi"}))
    assert_refused(await client.post("/invocations", json={"inputs": "Hi"}))
    assert await follow(client, *native("Hi", 5)) == [REFUSED]
    path, body = chat("Hi", 5)
    for stream in (True, False):
        assert_refused_openai(await client.post(path, json={**body, "stream": stream}))
        completion = {"prompt": "Hi", "max_tokens": 5, "stream": stream}
        assert_refused_openai(await client.post("/v1/completions", json=completion))
        response = {"input": "Hi", "max_output_tokens": 5, "stream": stream}
        assert_refused_openai(await client.post("/v1/responses", json=response))
        answer = await client.post("/v1/messages", json={**body, "model": "m", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
        assert int(answer.headers["retry-after"]) > 0
    for route in ("/health", "/info", "/metrics", "/v1/models"):
        assert (await client.get(route)).status_code == 200
    assert_refused(await client.post("/tokenize", json={"inputs": "Hi"}))


def overloaded(server: Server) -> float:
    return server.metrics().get('tgi_request_failure{err="overloaded"}', 0)


def in_flight(server: Server) -> float:
    return server.metrics().get("tgi_requests_in_flight", 0)


def test_too_many_at_a_time(small: Server) -> None:
    new_tokens, refusals = 40, overloaded(small)

    async def run() -> list[list[Event]]:
        started = Started(LIMIT)
        async with client_of(small.url) as client:
            streams = [
                asyncio.create_task(
                    follow(client, *(native if n % 2 else chat)(counting(n), new_tokens), started.stream())
                )
                for n in range(LIMIT)
            ]
            await started.wait(streams)
            with stopped(small.children()["engine"]):  # nobody can wait for the engine now
                await knock_everywhere(client)
            crowd = await asyncio.gather(*(client.post("/generate", json={"inputs": "Hi"}) for _ in range(100)))
            assert not any(task.done() for task in streams), "the crowd came too late"
            for answer in crowd:
                assert_refused(answer)
            return await asyncio.gather(*streams)

    for number, events in enumerate(asyncio.run(run())):
        if number % 2:
            assert len(events) == new_tokens and events[-1]["generated_text"]
        else:
            assert events[-1] is DONE and events[-2]["choices"][0]["finish_reason"] == "length"
    assert overloaded(small) == refusals + 13 + 100
    small.wait_for(lambda: in_flight(small) == 0, "the last to leave")
    with small.client() as client:
        assert client.post("/generate", json=native("Hi", 3)[1]).status_code == 200


def test_candidates_count(small: Server) -> None:
    sampled = {"max_new_tokens": 4, "do_sample": True}
    many = {"inputs": "Hi", "parameters": {**sampled, "best_of": 2}}
    path, choices = chat("Hi", 4, n=2, stream=False, temperature=1.0)

    async def run() -> None:
        async with client_of(small.url) as client:
            with stopped(small.children()["engine"]):
                waiting = [asyncio.create_task(client.post("/generate", json=many))]
                while in_flight(small) != 2:
                    await asyncio.sleep(0.01)
                waiting.append(asyncio.create_task(client.post("/generate", json=native("Hi", 4)[1])))
                while in_flight(small) != 3:
                    await asyncio.sleep(0.01)
                assert_refused(await client.post("/generate", json=many))
                assert_refused_openai(await client.post(path, json=choices))
                prompts = {"prompt": ["Hi", "Ho"], "max_tokens": 4}
                assert_refused_openai(await client.post("/v1/completions", json=prompts))
                waiting.append(asyncio.create_task(client.post("/generate", json=native("Hi", 4)[1])))  # one fits
                while in_flight(small) != LIMIT:
                    await asyncio.sleep(0.01)
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 3
            assert (await client.post(path, json=choices)).status_code == 200

    asyncio.run(run())
    assert in_flight(small) == 0


def test_more_than_the_server_takes_at_all(small: Server) -> None:
    """Not a matter of load, but it must not be let in either."""
    with small.client() as client:
        path, body = chat("Hi", 4, n=LIMIT + 1, stream=False, temperature=1.0)
        assert 400 <= client.post(path, json=body).status_code < 500
    assert in_flight(small) == 0


def test_too_many_queued_tokens(small: Server) -> None:
    long = {"inputs": "word " * (QUEUED_TOKENS + 50), "parameters": {"max_new_tokens": 4}}

    async def run() -> None:
        async with client_of(small.url) as client:
            for _ in range(2):  # what was queued is forgotten, or the second time would find the queue full
                with stopped(small.children()["engine"]):
                    waiting = asyncio.create_task(client.post("/generate", json=long))
                    while in_flight(small) != 1:
                        await asyncio.sleep(0.01)
                    await knock_everywhere(client)
                assert (await waiting).status_code == 200

    asyncio.run(run())
    assert in_flight(small) == 0


def test_queued_tokens_of_those_who_left_are_forgotten(small: Server) -> None:
    long = {"inputs": "word " * (QUEUED_TOKENS + 50), "parameters": {"max_new_tokens": 4}}

    async def run() -> None:
        async with client_of(small.url) as client:
            with stopped(small.children()["engine"]):
                leaving = asyncio.create_task(client.post("/generate", json=long))
                while in_flight(small) != 1:
                    await asyncio.sleep(0.01)
                assert_refused(await client.post("/generate", json={"inputs": "Hi"}))
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                while in_flight(small) != 0:
                    await asyncio.sleep(0.01)
                staying = asyncio.create_task(client.post("/generate", json=native("Hi", 4)[1]))
                while in_flight(small) != 1:
                    await asyncio.sleep(0.01)
            assert (await staying).status_code == 200

    asyncio.run(run())


def test_who_holds_most_leaves_the_last_place_to_others(small: Server) -> None:
    """127.0.0.2 is another client than 127.0.0.1, and takes whatever there is."""
    long = native("Hi", 40)[1]

    async def run() -> None:
        transport = httpx.AsyncHTTPTransport(verify=NO_TLS, local_address="127.0.0.2")
        flooder = httpx.AsyncClient(base_url=small.url, timeout=120, transport=transport)
        async with flooder, client_of(small.url) as honest:
            assert (
                await honest.post("/generate", json=native("Hi", 1)[1])
            ).status_code == 200  # it is known from now on
            with stopped(small.children()["engine"]):
                flood = [asyncio.create_task(flooder.post("/generate", json=long)) for _ in range(LIMIT - 1)]
                while in_flight(small) != LIMIT - 1:
                    await asyncio.sleep(0.01)
                assert_refused(await flooder.post("/generate", json=long))
                waiting = asyncio.create_task(honest.post("/generate", json=long))
                while in_flight(small) != LIMIT:
                    await asyncio.sleep(0.01)
                    assert not waiting.done(), waiting.result().text
                assert_refused(await honest.post("/generate", json=long))  # full is full
            assert [(await answer).status_code for answer in (*flood, waiting)] == [200] * LIMIT

    asyncio.run(run())
    assert in_flight(small) == 0
