"""Input nobody should send: a clear answer at once, the server healthy, and others unaffected."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from events import read_events
from serving import Server

pytestmark = pytest.mark.usefixtures("prompt_event_loop")

GOOD = b'{"inputs":"Count: one, two,","parameters":{"max_new_tokens":2}}'
JSON = {"content-type": "application/json"}
GENERATING = ["/generate", "/generate_stream", "/", "/invocations", "/v1/completions", "/v1/chat/completions"]


@pytest.fixture(autouse=True)
def others_are_unaffected(server: Server) -> Iterator[None]:
    """A normal request runs beside every test, and the server answers, in the same processes, when it is over."""
    before = server.children()
    done = threading.Event()
    failures: list[str] = []

    def ask() -> None:
        with server.client() as client:
            body = {"inputs": "Count: one, two,", "parameters": {"max_new_tokens": 4}}
            while True:
                answer = client.post("/generate", json=body)
                if answer.text != '{"generated_text":" three, four,"}':
                    failures.append(answer.text)
                if done.wait(0.2):
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    assert failures == []
    with server.client() as client:
        assert client.get("/health").status_code == 200
    assert server.children() == before
    assert "a route failed" not in server.log
    assert "Traceback" not in server.log, server.log[-3000:]


# -- bodies --------------------------------------------------------------------------------------------------------

NESTED = b"[" * 100_000
MALFORMED = {
    "empty": b"",
    "blank": b"  \n ",
    "truncated": GOOD[:-5],
    "two values": GOOD + GOOD,
    "single quotes": b"{'inputs':'a'}",
    "comment": b'{"inputs":"a"/* hi */}',
    "trailing comma": b'{"inputs":"a",}',
    "byte order mark": b"\xef\xbb\xbf" + GOOD,
    "utf-16": GOOD.decode().encode("utf-16"),
    "latin-1": '{"inputs":"ü"}'.encode("latin-1"),
    "invalid utf-8": b'{"inputs":"\xff\xfe\xc0\x80"}',
    "surrogate as utf-8": b'{"inputs":"\xed\xa0\x80"}',
    "lone surrogate": b'{"inputs":"\\ud800"}',
    "lone low surrogate": b'{"inputs":"\\udc00x"}',
    "bad escape": b'{"inputs":"\\x41"}',
    "raw newline in a string": b'{"inputs":"a\nb"}',
    "NaN": b'{"inputs":"a","parameters":{"temperature":NaN}}',
    "Infinity": b'{"inputs":"a","parameters":{"temperature":-Infinity}}',
    "nothing but brackets": NESTED,
    "deep": b'{"inputs":' + NESTED + b"]" * 100_000 + b"}",
    "deep and unknown": b'{"unknown":' + NESTED + b"]" * 100_000 + b',"inputs":"a"}',
    "deep objects": b'{"parameters":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b',"inputs":"a"}',
    "zip": b"PK\x03\x04" + bytes(1000),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(100),
    "form": b"inputs=a&parameters=b",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies(http: httpx.Client, name: str) -> None:
    for path in [*GENERATING, "/tokenize", "/chat_tokenize", "/vertex", "/v2/models/m/versions/1/infer"]:
        answer = http.post(path, content=MALFORMED[name], headers=JSON)
        assert answer.status_code in (400, 422), (path, answer.status_code)
        text = answer.json()["error"]["message"] if path.startswith("/v1/") else answer.text
        assert text.startswith(("Failed to parse the request body as JSON: ", "Failed to deserialize the JSON body"))
        if path == "/generate" and name not in ("nothing but brackets", "deep", "deep objects"):
            assert answer.status_code == 400


HUGE = {
    "huge integer": b"1" + b"0" * 400,
    "very huge integer": b"9" * 100_000,
    "huge float": b"1e400",
    "negative huge": b"-1e400",
    "float beyond float32": b"1e39",
    "many digits": b"0." + b"3" * 100_000,
    "tiny": b"1e-400",
    "minus zero": b"-0",
    "string": b'"1"',
    "boolean": b"true",
    "object": b"{}",
    "list": b"[1]",
}


@pytest.mark.parametrize("name", HUGE)
def test_numbers(http: httpx.Client, name: str) -> None:
    """Every numeric parameter with every odd number: accepted or refused with a text, never a failure."""
    native = (
        "best_of temperature repetition_penalty frequency_penalty top_k top_p typical_p top_n_sigma max_new_tokens truncate seed"
        " top_n_tokens"
    )
    for parameter in native.split():
        limit = b"" if parameter == "max_new_tokens" else b'"max_new_tokens":1,'
        body = b'{"inputs":"a","parameters":{%s"%s":%s}}' % (limit, parameter.encode(), HUGE[name])
        answer = http.post("/generate", content=body, headers=JSON)
        assert answer.status_code in (200, 422), (parameter, answer.text)
        if answer.status_code == 422 and answer.headers["content-type"] == "application/json":
            assert answer.json()["error_type"] == "validation"
    openai = "temperature top_p frequency_penalty presence_penalty max_tokens n seed top_k min_p top_n_sigma truncate logprobs"
    for parameter in openai.split():
        limit = b"" if parameter == "max_tokens" else b'"max_tokens":1,'
        body = b'{"prompt":"a",%s"%s":%s}' % (limit, parameter.encode(), HUGE[name])
        answer = http.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code in (200, 400), (parameter, answer.text)


def test_wrong_types_everywhere(http: httpx.Client) -> None:
    values: list[object] = [None, True, 1, 1.5, "x", [], {}, [None], {"a": None}, [[]], ""]
    for value in values:
        for body in ({"inputs": value}, {"inputs": "a", "parameters": value}, value):
            answer = http.post("/tokenize", content=json.dumps(body), headers=JSON)
            assert answer.status_code in (200, 422), body
        chats: list[dict] = [
            {"messages": value},
            {"messages": [value]},
            {"messages": [{"role": value, "content": "a"}]},
            {"messages": [{"role": "user", "content": value}]},
            {"messages": [{"role": "user", "content": [value]}]},
            {"messages": [{"role": "user", "content": "a", "tool_calls": value}]},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [value]}]},
        ]
        names = "tools tool_choice response_format stop logit_bias stream_options chat_template_kwargs documents model"
        chats += [{"messages": [{"role": "user", "content": "a"}], name: value} for name in names.split()]
        for body in chats:
            answer = http.post("/v1/chat/completions", json={"max_tokens": 1, **body})
            assert answer.status_code in (200, 400), (body, answer.text)


def test_ten_megabytes(http: httpx.Client) -> None:
    body = b'{"inputs":"' + b"a " * 5_000_000 + b'"}'
    for path in GENERATING:
        answer = http.post(path, content=body, headers=JSON)
        assert answer.status_code == 413
        assert "Failed to buffer the request body: length limit exceeded" in answer.text


def test_largest_allowed_body(http: httpx.Client) -> None:
    """Two megabytes in one word, which must be tokenised to find that they are too long."""
    body = {"inputs": "a" * 1_900_000, "parameters": {"max_new_tokens": 1}}
    answer = http.post("/generate", json=body)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    body["parameters"]["truncate"] = 3
    assert http.post("/generate", json=body).status_code == 200


def test_tokenising_keeps_nobody_waiting(server: Server, http: httpx.Client) -> None:
    """While two megabytes are tokenised others are answered all the time: no pause as long as half of the work."""
    text = "a " * 990_000
    over = threading.Event()

    def ask() -> None:
        with server.client() as client:
            client.post("/generate", json={"inputs": text})
        over.set()

    thread = threading.Thread(target=ask)
    moments = [time.monotonic()]
    thread.start()
    while not over.is_set():
        assert http.get("/health").status_code == 200
        moments.append(time.monotonic())
    thread.join()
    longest = max(later - earlier for earlier, later in itertools.pairwise(moments))
    assert longest < (moments[-1] - moments[0]) / 2


def test_texts_of_all_kinds(http: httpx.Client) -> None:
    for text in ("\x00", "\x00" * 20, "\u202e\u2066", "\ufffd", "\U0010ffff", "e\u0301" * 9, "\r\n\t\v", "😀" * 9):
        body = {"inputs": text, "parameters": {"max_new_tokens": 2, "return_full_text": True}}
        answer = http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["generated_text"].startswith(text)
        events = read_events(http.post("/generate_stream", json=body).content)
        assert events[-1]["generated_text"].startswith(text)
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200


def test_every_added_token_as_text(http: httpx.Client) -> None:
    """In prompts, roles, messages, stop strings and model names; none of them may break the others' framing."""
    found = http.post("/tokenize", json={"inputs": "".join(f"<|{name}|>" for name in ("im_start", "im_end"))}).json()
    assert [token["id"] for token in found] == [1, 2]
    texts = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<repo_name>",
        "<reponame>",
        "<file_sep>",
        "<filename>",
        "<gh_stars>",
        "<issue_start>",
        "<issue_comment>",
        "<issue_closed>",
        "<jupyter_start>",
        "<jupyter_text>",
        "<jupyter_code>",
        "<jupyter_output>",
        "<jupyter_script>",
        "<empty_output>",
    ]
    for text in texts:
        (token,) = http.post("/tokenize", json={"inputs": text}).json()
        assert (token["text"], token["start"], token["stop"]) == (text, 0, len(text))
        body = {"inputs": text, "parameters": {"max_new_tokens": 2, "details": True, "stop": [text]}}
        assert http.post("/generate", json=body).status_code == 200
        chat = {"messages": [{"role": text, "content": text}], "max_tokens": 1, "model": text, "stop": text}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200


def test_thousands_of_stop_strings(http: httpx.Client) -> None:
    stops = [f"stop {number}" for number in range(50_000)]
    answer = http.post("/generate", json={"inputs": "a", "parameters": {"stop": stops}})
    assert answer.json()["error"] == ("Input validation error: `stop` supports up to 4 stop sequences. Given: 50000")
    assert http.post("/v1/completions", json={"prompt": "a", "stop": stops}).status_code == 400
    text = "Input validation error: `stop` must not contain a string of more than 1000 characters"
    answer = http.post("/generate", json={"inputs": "a", "parameters": {"stop": ["x" * 1001]}})
    assert (answer.status_code, answer.json()["error"]) == (422, text)
    assert http.post("/v1/completions", json={"prompt": "a", "stop": "x" * 400_000}).json()["error"]["message"] == text
    long = ["x" * 1000, "y" * 1000, "z" * 1000, " three"]
    body = {"inputs": "Count: one, two,", "parameters": {"stop": long, "max_new_tokens": 4}}
    assert http.post("/generate", json=body).json() == {"generated_text": " three"}
    chat = {"prompt": "Count: one, two,", "temperature": 0, "stop": long[:3], "max_tokens": 4}
    assert http.post("/v1/completions", json=chat).json()["choices"][0]["text"] == " three, four,"
    empty = http.post("/generate", json={"inputs": "a", "parameters": {"stop": [""]}})
    assert (empty.status_code, empty.json()["error_type"]) == (422, "validation")


def test_thousands_of_everything_else(http: httpx.Client) -> None:
    message = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    bodies: list[dict] = [
        {"messages": [message] * 20_000},
        {"messages": [message], "tools": [tool] * 10_000},
        {"messages": [message], "logit_bias": {str(number): 1 for number in range(49_152)}},
        {"messages": [message], "chat_template_kwargs": {f"k{number}": "v" * 100 for number in range(10_000)}},
        {"messages": [message], "chat_template_kwargs": {"a": json.loads("[" * 300 + "]" * 300)}},
        {"messages": [message], "documents": [{"text": "x" * 100}] * 5_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]},
        {"messages": [message], "model": "m" * 1_000_000},
    ]
    for body in bodies:
        answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert answer.status_code in (200, 400), answer.text[:300]


# -- grammars ------------------------------------------------------------------------------------------------------


def nested_schema(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BOMBS = {
    "repeats of repeats": {"type": "regex", "value": "((a{1,1000}){1,1000}){1,1000}"},
    "long regex": {"type": "regex", "value": "a" * 500_000},
    "many alternatives": {"type": "regex", "value": "|".join(f"word{number}" for number in range(20_000))},
    "nothing matches": {"type": "regex", "value": "[^\\s\\S]"},
    "look-around": {"type": "regex", "value": "(?=a)(?!b)(?<=c)x"},
    "back reference": {"type": "regex", "value": "(a)\\1"},
    "deep schema": {"type": "json", "value": nested_schema(120)},
    "wide schema": {"type": "json", "value": {"properties": {f"p{n}": {"type": "string"} for n in range(5_000)}}},
    "long enum": {"type": "json", "value": {"properties": {"a": {"enum": ["x" * 50 + str(n) for n in range(10_000)]}}}},
    "endless reference": {"type": "json", "value": {"properties": {"a": {"$ref": "#/properties/a"}}}},
    "remote reference": {"type": "json", "value": {"properties": {"a": {"$ref": "http://127.0.0.1:1/schema"}}}},
    "huge counts": {"type": "json", "value": {"properties": {"a": {"type": "array", "minItems": 10**9}}}},
    "huge multiple": {"type": "json", "value": {"properties": {"a": {"type": "integer", "multipleOf": 99_991}}}},
    "contradiction": {
        "type": "json",
        "value": {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["a"]},
    },
    "pattern bomb": {
        "type": "json",
        "value": {"properties": {"a": {"type": "string", "pattern": "(x{1,999}){1,999}"}}},
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_grammar_bombs(http: httpx.Client, name: str) -> None:
    body = {"inputs": "a", "parameters": {"grammar": BOMBS[name], "max_new_tokens": 2}}
    answer = http.post("/generate", json=body)
    assert answer.status_code in (200, 422, 424), answer.text[:500]
    if answer.status_code != 200:
        assert len(answer.text) < 3_000
        assert answer.json()["error"]
    refused = name in (
        "long regex",
        "nothing matches",
        "look-around",
        "deep schema",
        "remote reference",
        "contradiction",
    )
    assert not refused or answer.status_code == 422, answer.text
    chat = {"messages": [{"role": "user", "content": "a"}], "response_format": BOMBS[name], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=chat).status_code in (200, 400, 424, 500)


# -- connections ---------------------------------------------------------------------------------------------------


def connect(server: Server) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    sock.settimeout(60)
    return sock


def head(path: str = "/generate", *more: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes."""
    pieces = []
    while piece := sock.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """One answer with a content length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    top, _, body = data.partition(b"\r\n\r\n")
    fields = [line.split(b":", 1) for line in top.split(b"\r\n")[1:]]
    length = next(int(value) for name, value in fields if name.lower() == b"content-length")
    while len(body) < length:
        piece = sock.recv(65536)
        assert piece
        body += piece
    assert len(body) == length, "more than one answer"
    return int(top.split()[1]), body


def test_body_that_ends_early(server: Server) -> None:
    for stop_at in (0, 1, len(GOOD) // 2, len(GOOD) - 1):
        with connect(server) as sock:
            sock.sendall(head("/generate", f"Content-Length: {len(GOOD)}") + GOOD[:stop_at])
            sock.shutdown(socket.SHUT_WR)
            assert b"200 OK" not in read_all(sock)


def test_half_closed_connection_still_gets_its_answer(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(head("/generate", f"Content-Length: {len(GOOD)}") + GOOD)
        sock.shutdown(socket.SHUT_WR)
        assert b"generated_text" in read_all(sock)


def test_connections_that_say_nothing(server: Server, http: httpx.Client) -> None:
    """Two hundred open and silent ones do not keep others from being answered."""
    silent = [connect(server) for _ in range(200)]
    try:
        for sock in silent[:100]:
            sock.sendall(b"POST /generate HTTP/1.1\r\nHo")
        assert http.get("/health").status_code == 200
        assert http.post("/generate", content=GOOD, headers=JSON).status_code == 200
    finally:
        for sock in silent:
            sock.close()


def test_slow_sender(server: Server) -> None:
    with connect(server) as sock:
        request = head("/generate", f"Content-Length: {len(GOOD)}", "Connection: close") + GOOD
        for start in range(0, len(request), 9):
            sock.sendall(request[start : start + 9])
            time.sleep(0.01)
        assert b"generated_text" in read_all(sock)


def test_slow_reader(server: Server) -> None:
    """A stream that nobody reads is no burden for others, and is still whole when somebody does."""
    body = b'{"inputs":"Count: one, two,","parameters":{"max_new_tokens":100,"top_n_tokens":5}}'
    with connect(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(head("/generate_stream", f"Content-Length: {len(body)}", "Connection: close") + body)
        time.sleep(0.5)
        data = read_all(sock)
    assert data.count(b'"index":') == 100


def test_pipelined_requests(server: Server) -> None:
    """Several requests at once on one connection: answered in order."""
    texts = [b'{"inputs":"%d"}' % number for number in range(5)]
    request = b"".join(head("/tokenize", f"Content-Length: {len(text)}") + text for text in texts)
    with connect(server) as sock:
        sock.sendall(
            request + head("/nothing", "Content-Length: 0") + head("/health", "Connection: close", method="GET")
        )
        data = read_all(sock)
    assert data.count(b"HTTP/1.1 200 OK") == 6
    assert data.count(b"HTTP/1.1 404 Not Found") == 1
    places = [data.index(b'"text":"%d"' % number) for number in range(5)]
    assert places == sorted(places)


def test_one_connection_for_many_requests(server: Server) -> None:
    with connect(server) as sock:
        for content, status in ((GOOD, 200), (b"{", 400), (b"{}", 422), (GOOD, 200)):
            sock.sendall(head("/generate", f"Content-Length: {len(content)}") + content)
            assert read_answer(sock)[0] == status


def test_http_1_0(server: Server) -> None:
    for path, mark in (("/generate", b"generated_text"), ("/generate_stream", b'"index":2')):
        with connect(server) as sock:
            sock.sendall(head(path, f"Content-Length: {len(GOOD)}", version="1.0") + GOOD)
            data = read_all(sock)
        assert data.split(b"\r\n")[0].endswith(b"200 OK")
        assert mark in data


def test_chunked_uploads(server: Server) -> None:
    for size in (1, 7, 1000):
        pieces = [GOOD[start : start + size] for start in range(0, len(GOOD), size)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        with connect(server) as sock:
            sock.sendall(head("/generate", "Transfer-Encoding: chunked", "Connection: close") + body)
            assert b"generated_text" in read_all(sock)
    with connect(server) as sock:
        sock.sendall(head("/generate", "Transfer-Encoding: chunked") + b"zz\r\nxx")
        assert read_all(sock).startswith(b"HTTP/1.1 400 Bad Request")


def test_expect_continue(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(head("/generate", f"Content-Length: {len(GOOD)}", "Expect: 100-continue", "Connection: close"))
        assert sock.recv(4096).startswith(b"HTTP/1.1 100 Continue")
        sock.sendall(GOOD)
        assert b"generated_text" in read_all(sock)


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 200 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a" * 100_000 + b": b\r\n\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),  # TLS
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", 505),
        (b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_heads(server: Server, request_head: bytes, status: int) -> None:
    with connect(server) as sock:
        sock.settimeout(10)
        sock.sendall(request_head)
        data = read_all(sock)
    assert data.split(b"\r\n")[0].startswith(b"HTTP/1.1 %d " % status), data[:200]


def test_announced_size_is_not_believed(server: Server) -> None:
    """A terabyte that never comes costs nothing, and the refusal does not wait for it."""
    with connect(server) as sock:
        sock.sendall(head("/generate", "Content-Length: 1000000000000", "Expect: 100-continue"))
        sock.sendall(b"x" * 100_000)
        sock.shutdown(socket.SHUT_WR)
        assert b"200 OK" not in read_all(sock)


def test_query_strings_and_odd_paths(http: httpx.Client) -> None:
    assert http.get("/health?x=1&y").status_code == 200
    assert http.post("/generate?stream=true", content=GOOD, headers=JSON).json() == {"generated_text": " three,"}
    for path in ("/../info", "/%2e%2e/info", "/info%00", "/info%0d%0ax: y", "/\u00fc", "/generate;x", "/INFO", "/*"):
        assert http.get(path).status_code in (200, 404), path
    assert "x" not in http.get("/info%0d%0ax: y").headers


@pytest.mark.parametrize("depth", [200, 900, *range(965, 995, 3), 5_000])
def test_values_nested_deeply(http: httpx.Client, depth: int) -> None:
    """Deep enough for some later step, though the body itself could just be read: never a failure of the server."""
    text = "{" + '"a":{' * depth + "}" * depth + "}"
    messages = '"messages":[{"role":"user","content":"Hi"}],"max_tokens":1'
    call = f'{{"id":"1","type":"function","function":{{"name":"f","arguments":{text}}}}}'
    bodies = [
        f'{{{messages},"tools":[{{"type":"function","function":{{"name":"f","parameters":{text}}}}}]}}',
        f'{{"messages":[{{"role":"assistant","tool_calls":[{call}]}},{{"role":"user","content":"Hi"}}],"max_tokens":1}}',
        f'{{{messages},"chat_template_kwargs":{{"x":{text}}}}}',
        f'{{{messages},"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{text}}}}}}}',
    ]
    for body in bodies:
        answer = http.post("/v1/chat/completions", content=body, headers=JSON)
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("extra", [b"\r\n", b"\r\n\r\n\r\n"])
def test_an_empty_line_behind_a_body_disturbs_nothing(server: Server, extra: bytes) -> None:
    body = b'{"inputs":"Count: one, two,","parameters":{"max_new_tokens":30}}'
    head = f"POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        data = sock.recv(65536)
        sock.sendall(extra)
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
        assert data.count(b"data: ") == 30
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_settings_of_endless_length(http: httpx.Client) -> None:
    for bias in ([0] * 500_000, [1.0] * 5_000, {str(number): 1 for number in range(5_000)}):
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "logit_bias": bias})
        assert answer.status_code == (200 if bias == [0] * 500_000 else 400)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == "logit_bias"
