"""Small requests that ask for much, clients that do not read, texts that are large: each costs only itself."""

import json
import socket
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import Server

MB = 2**20
pytestmark = pytest.mark.usefixtures("prompt_event_loop")


def rss(server: Server, role: str = "api") -> int:
    status = Path(f"/proc/{server.children()[role]}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def test_a_temperature_at_which_everything_ties_is_refused(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 100, "temperature": 1e8, "top_n_tokens": 5, "details": True}
    answer = http.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert answer.status_code == 422
    text = "Input validation error: `temperature` must be <= 100. Given: 1e+08"
    assert answer.json() == {"error": text, "error_type": "validation"}


def test_the_most_varied_answer_is_small(http: httpx.Client, server: Server) -> None:
    parameters = {"max_new_tokens": 100, "temperature": 100, "top_n_tokens": 5, "details": True, "seed": 1}
    answer = http.post("/generate", json={"inputs": "x", "parameters": parameters})
    assert answer.status_code == 200
    assert all(5 <= len(tops) <= 13 for tops in answer.json()["details"]["top_tokens"])
    assert len(answer.content) < 200_000
    assert server.metrics()["tgi_api_loop_lag_seconds_count"] > 0


NUMBERS = ("temperature", "repetition_penalty", "frequency_penalty", "top_p", "typical_p")


@pytest.mark.parametrize("value", ["5e-324", "1e-300", "1e-38", "1e-10", "1e30", "1e308"])
def test_extreme_numbers_over_http(http: httpx.Client, value: str) -> None:
    for name in NUMBERS:
        body = f'{{"inputs":"a b","parameters":{{"max_new_tokens":2,"details":true,"seed":1,"{name}":{value}}}}}'
        answer = http.post("/generate", content=body, headers={"content-type": "application/json"})
        if answer.status_code == 422:
            assert f"`{name}` must be" in answer.json()["error"]
        else:
            assert answer.status_code == 200
            assert all(token["logprob"] is not None for token in answer.json()["details"]["tokens"]), (name, value)


def test_streams_that_nobody_reads_take_no_memory(server: Server, http: httpx.Client) -> None:
    http.post("/generate", json={"inputs": "warm", "parameters": {"max_new_tokens": 5}})
    before = rss(server)
    body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 150, "top_n_tokens": 5, "temperature": 100}})
    head = f"POST /generate_stream HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    unread = []
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        unread.append(connection)
    started = time.monotonic()
    answers = [http.get("/health").status_code for _ in range(20)]
    found = http.post("/generate", json={"inputs": "Count:", "parameters": {"max_new_tokens": 10}})
    assert set(answers) == {200} and found.status_code == 200
    server.wait_for(lambda: server.metrics()["tgi_batch_current_size"] == 0, "the engine to be done", 120)
    assert rss(server) - before < 60 * MB, time.monotonic() - started
    for connection in unread:
        connection.close()


# -- /tokenize -----------------------------------------------------------------------------------------------------

WORDS = "a b " * 60_000


def test_long_texts_are_sent_in_pieces(http: httpx.Client) -> None:
    with http.stream("POST", "/tokenize", json={"inputs": WORDS}) as answer:
        assert answer.status_code == 200 and "content-length" not in answer.headers
        found = json.loads(answer.read())
    short = http.post("/tokenize", json={"inputs": "a b a b"}).json()
    assert list(found[0]) == ["id", "text", "start", "stop"]
    assert found[:4] == short
    assert "".join(token["text"] for token in found) == WORDS
    text = "é ü " * 1000
    chat = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
    assert list(chat) == ["tokenize_response", "templated_text"] and text.strip() in chat["templated_text"]
    assert chat["tokenize_response"][-1]["stop"] == len(chat["templated_text"].encode())


def test_too_long_texts_are_refused_by_name(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"inputs": "a" * 300_000})
    text = "`inputs` must have at most 262144 characters to be tokenized. Given: 300000"
    assert (answer.status_code, answer.json()["error"]) == (422, f"Input validation error: {text}")
    chat = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": "a" * 300_000}]})
    assert (chat.status_code, "`messages` must have at most" in chat.json()["error"]) == (422, True)


def test_memory_of_long_texts_comes_back(server: Server, http: httpx.Client) -> None:
    http.post("/tokenize", json={"inputs": WORDS})
    before = rss(server)
    for _ in range(3):
        assert http.post("/tokenize", json={"inputs": WORDS}).status_code == 200
        assert http.post("/generate", json={"inputs": WORDS}).status_code == 422
    time.sleep(0.3)
    assert rss(server) - before < 60 * MB


# -- the prefix cache ----------------------------------------------------------------------------------------------


def cached(http: httpx.Client, text: str, path: str = "/v1/completions", **fields: object) -> int:
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    answer = http.post(path, json={**body, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_salts_keep_prefixes_apart(http: httpx.Client, path: str) -> None:
    text = f"tenants of {path} are kept apart " * 12
    assert cached(http, text, path, cache_salt="one") == 0
    assert cached(http, text, path, cache_salt="two") == 0
    assert cached(http, text, path) <= 32  # what a template puts before every chat may be there
    assert cached(http, text, path, cache_salt="one") > 64
    assert cached(http, text, path) > 64


NATIVE = [
    ("/generate", lambda text, salt: {"inputs": text, "parameters": {"max_new_tokens": 1, "cache_salt": salt}}),
    ("/generate_stream", lambda text, salt: {"inputs": text, "parameters": {"max_new_tokens": 1, "cache_salt": salt}}),
    ("/", lambda text, salt: {"inputs": text, "parameters": {"max_new_tokens": 1, "cache_salt": salt}}),
    ("/invocations", lambda text, salt: {"inputs": text, "parameters": {"max_new_tokens": 1, "cache_salt": salt}}),
    (
        "/vertex",
        lambda text, salt: {"instances": [{"inputs": text, "parameters": {"max_new_tokens": 1, "cache_salt": salt}}]},
    ),
    (
        "/v2/models/m/versions/1/infer",
        lambda text, salt: {
            "id": "1",
            "inputs": [{"name": "i", "shape": [1], "datatype": "BYTES", "data": list(text.encode())}],
            "outputs": [{"name": "o"}],
            "parameters": {"max_new_tokens": 1, "cache_salt": salt},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), NATIVE, ids=[path for path, _ in NATIVE])
def test_every_route_takes_a_salt(http: httpx.Client, path: str, body) -> None:
    """What a route left in the cache is found under its salt, and under no other."""
    text = f"what {path} computes is found by nobody else " * 8
    assert http.post(path, json=body(text, "mine")).status_code == 200
    assert cached(http, text, cache_salt="yours") == 0
    assert cached(http, text, cache_salt="mine") > 0


def test_salts_are_bounded(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "cache_salt": "s" * 1000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
