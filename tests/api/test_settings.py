"""One server with unusual settings: key, origins, limits, switched-off grammars, routes from the environment."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from events import read_events
from serving import Server

from text_generation_inference.api.routes import ROUTES

KEY = "SeCret-Key-123"
ORIGINS = ["https://a.example", "https://b.example:8443"]
PAYLOAD_LIMIT = 50_000
# Everything that may be asked without the key. A route that is not named here must refuse.
PUBLIC = {
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/info"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/docs/{rest*}"),
    ("GET", "/api-doc/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model*}"),
    ("GET", "/v2"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models/{model_name}/versions/{model_version}"),
    ("GET", "/v2/models/{model_name}/versions/{model_version}/ready"),
    ("GET", "/aip/health"),
}


@pytest.fixture(scope="module")
def odd(model_cache: Path) -> Iterator[Server]:
    running = Server(
        "--disable-grammar-support",
        "--enable-prefill-logprobs",
        *("--max-best-of", "1"),
        *("--max-stop-sequences", "1"),
        *("--max-top-n-tokens", "2"),
        *("--max-client-batch-size", "2"),
        *("--max-concurrent-requests", "4"),
        *("--max-input-tokens", "400"),
        *("--max-total-tokens", "2000"),
        *("--max-batch-total-tokens", "16384"),
        *("--payload-limit", str(PAYLOAD_LIMIT)),
        *("--api-key", KEY),
        *("--cors-allow-origin", ORIGINS[0], "--cors-allow-origin", ORIGINS[1]),
        cache=model_cache,
        AIP_PREDICT_ROUTE="/aip/predict",
        AIP_HEALTH_ROUTE="/aip/health",
        COMPUTE_TYPE="my-accelerator",
    )
    yield running
    assert running.stop() == 0, running.log[-3000:]


@pytest.fixture
def http(odd: Server) -> Iterator[httpx.Client]:
    with odd.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture
def stranger(odd: Server) -> Iterator[httpx.Client]:
    with odd.client() as client:
        yield client


# -- the key -------------------------------------------------------------------------------------------------------


def all_routes() -> list[tuple[str, str]]:
    found = {(route.method, route.path) for route in ROUTES}
    return sorted(found | {("POST", "/aip/predict"), ("GET", "/aip/health")})


@pytest.mark.parametrize(("method", "path"), all_routes())
def test_every_route_but_the_public_ones_needs_the_key(
    http: httpx.Client, stranger: httpx.Client, method: str, path: str
) -> None:
    place = re.sub(r"\{\w+\}", "x", re.sub(r"\{\w+\*\}", "tgi", path))
    answer = stranger.request(method, place, json={})
    if (method, path) in PUBLIC:
        assert answer.status_code == 200
        return
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if place.startswith("/v1/messages"):
        assert answer.json()["error"]["type"] == "authentication_error"
    elif place.startswith("/v1/"):
        assert answer.json()["error"]["code"] == "invalid_api_key"
    else:
        assert answer.content == b""
    # Let in, and the empty body refused, or what has no such id.
    assert http.request(method, place, json={}).status_code in (400, 404, 422)
    assert stranger.request(method, place, json={}, headers={"x-api-key": KEY}).status_code in (400, 404, 422)
    assert stranger.request(method, place, json={}, headers={"x-api-key": KEY + "x"}).status_code == 401


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer {KEY}", True),
        (f"BEARER {KEY}", True),
        (f"Bearer {KEY.lower()}", False),
        (f"Bearer {KEY.upper()}", False),
        (f"Bearer {KEY[:-1]}", False),
        (f"Bearer {KEY}x", False),
        (f"Bearer  {KEY}", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("", False),
        (KEY, False),
        (f"Basic {KEY}", False),
        (f"Bearer {KEY}, Bearer x", False),
        ("Bearer \u00fc", False),
    ],
)
def test_the_key_is_exact(stranger: httpx.Client, header: str, allowed: bool) -> None:
    headers = [(b"authorization", header.strip(" ").encode())]
    answer = stranger.post("/tokenize", json={"inputs": "a"}, headers=headers)
    assert answer.status_code == (200 if allowed else 401)


def test_strangers_learn_nothing_of_routes_behind_the_key(stranger: httpx.Client) -> None:
    """The key is asked for before the body is looked at."""
    for content, kind in ((b"{", "application/json"), (b"", "text/plain"), (b"x" * 2 * PAYLOAD_LIMIT, "text/plain")):
        answer = stranger.post("/generate", content=content, headers={"content-type": kind})
        assert answer.status_code == 401
    assert stranger.get("/generate").status_code == 405
    assert stranger.get("/nothing").status_code == 404


def test_the_key_is_in_no_log_and_no_answer(odd: Server, http: httpx.Client) -> None:
    assert http.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 1}}).status_code == 200
    assert KEY not in odd.log
    assert KEY not in http.get("/info").text
    assert KEY not in http.get("/metrics").text
    for pid in odd.children().values():
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


# -- CORS ----------------------------------------------------------------------------------------------------------


def test_configured_origins(http: httpx.Client, stranger: httpx.Client) -> None:
    for origin in (*ORIGINS, "https://evil.example", "https://a.example.evil.example", "null", "https://A.example"):
        expected = origin if origin in ORIGINS else None
        preflight = stranger.options("/generate", headers={"origin": origin, "access-control-request-method": "POST"})
        assert preflight.status_code == 200
        assert preflight.headers.get("access-control-allow-origin") == expected
        for answer in (
            stranger.get("/info", headers={"origin": origin}),
            stranger.post("/generate", json={}, headers={"origin": origin}),
            http.post("/tokenize", json={"inputs": "a"}, headers={"origin": origin}),
        ):
            assert answer.headers.get("access-control-allow-origin") == expected
            assert "origin" in answer.headers["vary"].lower()
    assert "access-control-allow-origin" not in stranger.get("/info").headers


# -- limits --------------------------------------------------------------------------------------------------------


def validation(text: str) -> dict:
    return {"error": "Input validation error: " + text, "error_type": "validation"}


@pytest.mark.parametrize(
    ("row", "inputs", "parameters", "text"),
    [
        ("0a", "a", {"best_of": 2}, "`best_of` != 1 is not allowed for this endpoint"),
        ("9", "a", {"stop": ["a", "b"]}, "`stop` supports up to 1 stop sequences. Given: 2"),
        ("11", "a", {"top_n_tokens": 3}, "`top_n_tokens` must be >= 0 and <= 2. Given: 3"),
        ("13", "a", {"truncate": 401}, "`truncate` must be strictly positive and less than 400. Given: 401"),
        ("17", "a" + " a" * 400, {}, "`inputs` must have less than 400 tokens. Given: 401"),
        (
            "16 before 17",
            "a" + " a" * 1000,
            {"max_new_tokens": 5000},
            "`inputs` tokens + `max_new_tokens` must be <= 2000. Given: 1001 `inputs` tokens and 1024 `max_new_tokens`",
        ),
        ("18", "a", {"grammar": {"type": "regex", "value": "a"}}, "grammar is not supported"),
        ("18", "a", {"grammar": {"type": "json", "value": {"properties": {}}}}, "grammar is not supported"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_rows_that_depend_on_settings(http: httpx.Client, row: str, inputs: str, parameters: dict, text: str) -> None:
    body = {"inputs": inputs, "parameters": parameters}
    answer = http.post("/generate", json=body)
    assert (answer.status_code, answer.json()) == (422, validation(text))
    if "best_of" not in parameters:
        streamed = http.post("/generate_stream", json=body)
        assert (streamed.status_code, read_events(streamed.content)) == (200, [validation(text)])


def test_only_the_first_chunk_must_fit(http: httpx.Client) -> None:
    """More than there is room for is accepted when the first 1024 fit, and ends at the limit of the server."""
    body = {"inputs": "a a", "parameters": {"max_new_tokens": 100_000, "stop": ["e"], "details": True}}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text


def test_switched_off_grammars_on_openai_routes(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for more in ({"response_format": {"type": "json_object"}}, {"tools": tools, "tool_choice": "required"}):
        answer = http.post("/v1/chat/completions", json={"messages": messages, **more})
        assert answer.status_code == 400
        assert "grammar is not supported" in answer.json()["error"]["message"]
    body = {"messages": messages, "tools": tools, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_payload_limit(http: httpx.Client) -> None:
    def body(size: int) -> bytes:
        rest = b'{"inputs":"%s","parameters":{"max_new_tokens":1,"truncate":5}}'
        return rest.replace(b"%s", b"a " * ((size - len(rest) + 2) // 2)).ljust(size)

    headers = {"content-type": "application/json"}
    assert http.post("/generate", content=body(PAYLOAD_LIMIT), headers=headers).status_code == 200
    for content in (body(PAYLOAD_LIMIT + 1), body(10_000_000)):
        answer = http.post("/generate", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.text == "Failed to buffer the request body: length limit exceeded"
        chunked = http.post("/generate", content=iter([content[:1000], content[1000:]]), headers=headers)
        assert (chunked.status_code, chunked.text) == (413, answer.text)
        openai = http.post("/v1/completions", content=content, headers=headers)
        assert (openai.status_code, openai.json()["error"]["message"]) == (413, answer.text)


def test_number_of_prompts(http: httpx.Client) -> None:
    """`--max-client-batch-size` is for native batches, of which there are none; what may run at a time is the limit."""
    answer = http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 1})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 3
    answer = http.post("/v1/completions", json={"prompt": ["a"] * 50, "max_tokens": 1})
    assert answer.status_code in (400, 429) and answer.json()["error"]["message"]


def test_overload(odd: Server, http: httpx.Client) -> None:
    """Four run; the fifth is told at once, in every form; then there is room again."""
    body = {"inputs": "Count: one, two,", "parameters": {"max_new_tokens": 1024}}
    running: list[threading.Event] = []
    release = threading.Event()

    def occupy(started: threading.Event) -> None:
        with (
            odd.client(headers={"authorization": f"Bearer {KEY}"}) as client,
            client.stream("POST", "/generate_stream", json=body) as answer,
        ):
            pieces = answer.iter_raw()  # kept: the connection closes with it
            next(pieces)
            started.set()
            release.wait(60)

    threads = []
    for _ in range(4):
        running.append(threading.Event())
        threads.append(threading.Thread(target=occupy, args=(running[-1],)))
        threads[-1].start()
    try:
        assert all(started.wait(60) for started in running)
        overloaded = {"error": "Model is overloaded", "error_type": "overloaded"}
        small = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
        for path in ("/generate", "/"):
            answer = http.post(path, json=small)
            assert (answer.status_code, answer.json()) == (429, overloaded)
            assert int(answer.headers["retry-after"]) >= 1
        answer = http.post("/generate_stream", json=small)
        assert (answer.status_code, read_events(answer.content)) == (200, [overloaded])
        for path, more in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            for streams in (False, True):
                answer = http.post(path, json={**more, "max_tokens": 1, "stream": streams})
                assert answer.status_code == 429
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert answer.json()["error"]["message"] == "Model is overloaded"
                assert int(answer.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 200
    finally:
        release.set()
        for thread in threads:
            thread.join()
    odd.wait_for(lambda: http.post("/generate", json=small).status_code == 200, "room")


# -- the rest ------------------------------------------------------------------------------------------------------


def test_details_of_the_prompt(http: httpx.Client) -> None:
    body = {"inputs": "Count: one, two,", "parameters": {"max_new_tokens": 2, "decoder_input_details": True}}
    found = http.post("/generate", json=body).json()
    prefill = found["details"]["prefill"]
    tokens = http.post("/tokenize", json=body).json()
    assert [entry["id"] for entry in prefill] == [token["id"] for token in tokens]
    assert [entry["text"] for entry in prefill] == [token["text"] for token in tokens]
    assert [list(entry) for entry in prefill] == [["id", "text", "logprob"]] * len(prefill)
    assert prefill[0]["logprob"] is None
    assert all(entry["logprob"] < 0 for entry in prefill[1:])
    assert len(found["details"]["tokens"]) == 2
    again = http.post("/generate", json=body).json()  # never from the prefix cache
    assert [entry["logprob"] for entry in again["details"]["prefill"][1:]] == pytest.approx(
        [entry["logprob"] for entry in prefill[1:]], abs=1e-3
    )
    plain = {"inputs": body["inputs"], "parameters": {"max_new_tokens": 2, "details": True}}
    assert http.post("/generate", json=plain).json()["details"]["prefill"] == []


def test_routes_of_the_environment(http: httpx.Client, stranger: httpx.Client) -> None:
    answer = http.post("/aip/predict", json={"instances": [{"inputs": "a", "parameters": {"max_new_tokens": 1}}]})
    assert answer.status_code == 200
    assert len(answer.json()["predictions"]) == 1
    health = stranger.get("/aip/health")
    assert (health.status_code, health.content) == (200, b"")


def test_info_tells_the_settings(http: httpx.Client) -> None:
    info = http.get("/info").json()
    names = ("max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_input_tokens", "max_total_tokens")
    assert [info[name] for name in names] == [4, 1, 1, 400, 2000]
    assert info["max_client_batch_size"] == 2


def test_compute_type(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 1}})
    assert answer.headers["x-compute-type"] == "my-accelerator"
    assert json.loads(answer.content)["generated_text"]


def test_requests_are_counted_as_tgi_counts(http: httpx.Client, server: Server) -> None:
    def counts() -> tuple[float, float, float]:
        metrics = server.metrics()
        failed = metrics.get('tgi_request_failure{err="validation"}', 0)
        return metrics.get("tgi_request_count", 0), metrics.get("tgi_request_success", 0), failed

    def added(path: str, body: dict[str, object]) -> tuple[float, ...]:
        before = counts()
        with server.client() as client:
            client.post(path, json=body)
        return tuple(after - earlier for after, earlier in zip(counts(), before, strict=True))

    short: dict[str, object] = {"max_new_tokens": 1}
    messages = [{"role": "user", "content": "Hi"}]
    assert added("/generate", {"inputs": "a", "parameters": short}) == (1, 1, 0)
    assert added("/generate", {"inputs": "a", "parameters": {"temperature": 0}}) == (1, 0, 1)
    assert added("/generate", {"inputs": "a", "parameters": {**short, "best_of": 2, "do_sample": True}}) == (1, 1, 0)
    assert added("/generate_stream", {"inputs": "a", "parameters": short}) == (1, 1, 0)
    assert added("/v1/chat/completions", {"messages": messages, "max_tokens": 1}) == (2, 1, 0)
    assert added("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}) == (3, 2, 0)
    assert added("/tokenize", {"inputs": "a"}) == (0, 0, 0)
