"""The events behind the dashboard: the numbers of /metrics, requests as they end, and nothing of what was said."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import httpx2 as httpx
import pytest
from serving import Server
from traffic import counting, native

from text_generation_inference.api.live import MAX_LISTENERS

SECRET = "xylophone"


@contextmanager
def events(server: Server, **headers: str) -> Iterator[Iterator[Any]]:
    with (
        server.client() as client,
        client.stream("GET", "/dashboard/events", headers=headers) as answer,
    ):
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream"
        yield (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)


@pytest.fixture(autouse=True)
def all_leave(server: Server, http: httpx.Client) -> Iterator[None]:
    """A client that closes its side may still read: that it is gone shows with the next event."""
    http.get("/health")  # its connection stays, or is made again below
    before = server.metrics()["tgi_http_connections"]
    yield
    http.get("/health")
    server.wait_for(lambda: server.metrics()["tgi_http_connections"] <= before, "streams to be closed")


def generate(http: httpx.Client, request_id: str, **parameters: Any) -> int:
    body = {"inputs": f"One {SECRET}, two", "parameters": {"max_new_tokens": 8, **parameters}}
    return http.post("/generate", json=body, headers={"x-request-id": request_id}).status_code


def test_tells_numbers_requests_and_errors_and_no_text(server: Server, http: httpx.Client) -> None:
    with events(server) as stream:
        start, first = next(stream), next(stream)
        assert (start["type"], start["max_total_tokens"], len(start["bounds"])) == ("start", 1024, 35)
        assert generate(http, "dash-good") == 200 and generate(http, "dash-bad", temperature=-1) == 422
        seen = [first]
        while not any(error["request_id"] == "dash-bad" for error in seen[-1]["errors"]):  # the other was before it
            seen.append(next(stream))
        last = next(stream)
        numbers = last["numbers"]
        told = server.metrics()
    assert not [name for name in numbers if name not in told]
    # What changes by itself while two answers are read is left out.
    still = {name for name in numbers if name.startswith(("tgi_request_", "tgi_kv_block", "tgi_prompt", "tgi_ranks"))}
    assert len(still) > 20 and {name: numbers[name] for name in still} == {name: told[name] for name in still}
    before, after = (sample["counts"]["tgi_request_duration"] for sample in (first, last))
    grown = [more - less for less, more in zip(before, after, strict=True)]
    assert sum(grown) == 1 and min(grown) == 0
    assert sum(last["counts"]["tgi_inter_token_duration"]) == told["tgi_inter_token_duration_count"]

    (ended,) = [request for sample in seen for request in sample["ended"] if request["request_id"] == "dash-good"]
    assert (ended["route"], ended["output_tokens"], ended["end"]) == ("/generate", 8, "length")
    assert 0 < ended["validated"] <= ended["admitted"] < ended["first_token"] < ended["total"]
    (error,) = [error for sample in seen for error in sample["errors"] if error["request_id"] == "dash-bad"]
    assert (error["route"], error["kind"], error["status"]) == ("/generate", "validation", 422)
    assert [engine["state"] for engine in last["engines"]] == ["up"]
    assert SECRET not in json.dumps([start, *seen, last])


def test_tells_of_requests_that_run(server: Server, http: httpx.Client) -> None:
    _, body = native(counting(3), 600)
    with events(server) as stream, http.stream("POST", "/generate_stream", json=body) as answer:
        lines = answer.iter_lines()  # one that is let go of closes the answer
        next(lines)
        samples = islice(stream, 10)
        request = next(sample["running"][0] for sample in samples if sample.get("running"))
    assert request["end"] == "" and request["first_token"] < request["total"] and request["output_tokens"] > 0


def test_closing_it_is_no_failure(server: Server) -> None:
    def dropped() -> float:
        return server.metrics().get('tgi_request_failure{err="dropped"}', 0)

    server.wait_for(lambda: server.metrics()["tgi_requests_in_flight"] == 0, "what other tests left")
    before, connections = dropped(), server.metrics()["tgi_http_connections"]
    with events(server) as stream:
        next(stream)
    server.wait_for(lambda: server.metrics()["tgi_http_connections"] <= connections, "the stream to be closed")
    assert dropped() == before


def test_is_open_so_often_and_no_more(server: Server, http: httpx.Client) -> None:
    def overloaded() -> float:
        return server.metrics().get('tgi_request_failure{err="overloaded"}', 0)

    before = overloaded()
    with ExitStack() as open_streams:
        for _ in range(MAX_LISTENERS):
            open_streams.enter_context(events(server))
        refused = http.get("/dashboard/events")
        assert refused.status_code == 429 and "open 16 times" in refused.json()["error"]
        assert refused.headers["retry-after"]
        assert http.head("/dashboard/events").status_code == 200
    assert overloaded() == before  # no generation was refused


def test_the_page_and_its_files_are_there_and_ask_for_nothing_else(http: httpx.Client) -> None:
    page = http.get("/dashboard")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    asked = ["dashboard/dashboard.css", "dashboard/main.js", "common/common.css"]
    for name in asked:
        assert f'"pages/{name}"' in page.text
    found: set[str] = set()
    while asked:
        name = asked.pop()
        if name not in found:
            found.add(name)
            file = http.get(f"/pages/{name}")
            assert file.status_code == 200 and "http://" not in file.text and "https://" not in file.text
            asked += [f"dashboard/{part}" for part in re.findall(r'from "\./([a-z]+\.js)"', file.text)]
    assert len(found) == 9  # no module is without its page, and none is missing
