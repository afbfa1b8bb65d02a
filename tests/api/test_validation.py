"""What is refused and how: every row of TGI's validation table, the framework's own errors, and nulls."""

import json

import httpx2 as httpx
import pytest
from events import read_events
from serving import Server

MAX_TOTAL, MAX_INPUT = 1024, 1023  # of the shared server
SCHEMA = {"properties": {"a": {"type": "integer"}}}
LONG = "word " * 2000


def grammar(kind: str, value: object) -> dict:
    return {"grammar": {"type": kind, "value": value}}


def num_tokens(http: httpx.Client, text: str) -> int:
    return len(http.post("/tokenize", json={"inputs": text}).json())


# Row, parameters, inputs, text. In the order of the table, so that the test of the order can go through neighbours.
COMMON = [
    (
        "1",
        {"best_of": 2},
        "a",
        "you must use sampling when `best_of` is > 1",
    ),
    ("2", {"temperature": 0.0}, "a", "`temperature` must be strictly positive"),
    ("2", {"temperature": -1}, "a", "`temperature` must be strictly positive"),
    ("3", {"repetition_penalty": 0}, "a", "`repetition_penalty` must be strictly positive"),
    ("3", {"repetition_penalty": -0.5}, "a", "`repetition_penalty` must be strictly positive"),
    ("4", {"frequency_penalty": 2.1}, "a", "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("4", {"frequency_penalty": -2.1}, "a", "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("ours", {"top_n_sigma": -0.5}, "a", "`top_n_sigma` must be >= 0.0 and <= 100.0"),
    ("ours", {"top_n_sigma": 101}, "a", "`top_n_sigma` must be >= 0.0 and <= 100.0"),
    ("5", {"top_p": 0}, "a", "`top_p` must be > 0.0 and < 1.0"),
    ("5", {"top_p": 1.0}, "a", "`top_p` must be > 0.0 and < 1.0"),
    ("6", {"typical_p": 0}, "a", "`typical_p` must be > 0.0 and < 1.0"),
    ("6", {"typical_p": 1.0}, "a", "`typical_p` must be > 0.0 and < 1.0"),
    ("7", {"top_k": 0}, "a", "`top_k` must be strictly positive"),
    ("7", {"top_k": -1}, "a", "`top_k` must be strictly positive"),
    ("8", {"max_new_tokens": 0}, "a", "`max_new_tokens` must be strictly positive"),
    ("9", {"stop": list("abcde")}, "a", "`stop` supports up to 4 stop sequences. Given: 5"),
    ("10", {"best_of": 2, "do_sample": True, "seed": 1}, "a", "`seed` must not be set when `best_of` > 1"),
    ("11", {"top_n_tokens": 6}, "a", "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("12", {}, "", "`inputs` cannot be empty"),
    ("13", {"truncate": 0}, "a", "`truncate` must be strictly positive and less than 1023. Given: 0"),
    ("13", {"truncate": 1024}, "a", "`truncate` must be strictly positive and less than 1023. Given: 1024"),
    # Rows 14 and 15 need a tokenizer that fails and a model with images.
    (
        "16",
        {"max_new_tokens": 1024},
        "Hello world",
        "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 2 `inputs` tokens and 1024 `max_new_tokens`",
    ),
    (
        "16, chunked",
        {"max_new_tokens": 100_000},
        "Hello world",
        "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 2 `inputs` tokens and 1024 `max_new_tokens`",
    ),
    (
        "16, no room at all",
        {},
        LONG,
        "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 2001 `inputs` tokens and 0 `max_new_tokens`",
    ),
    ("18", grammar("json", 5), "a", "grammar is not supported"),
    ("18", grammar("json", [1]), "a", "grammar is not supported"),
    ("18", grammar("json_object", None), "a", "grammar is not supported"),
    ("19", grammar("json", {"type": "object"}), "a", "grammar is not valid: Grammar must have a 'properties' field"),
    (
        "19",
        grammar("json_schema", {"name": "x", "schema": {"type": "object"}}),
        "a",
        "grammar is not valid: Grammar must have a 'properties' field",
    ),
]
# Rows whose text ends in words of the library that found the fault.
OPEN_ENDED = [
    ("19, not JSON", grammar("json", "{"), "grammar is not valid: "),
    ("19, not a schema", grammar("json", {"properties": {"a": {"type": "nothing"}}}), "grammar is not valid: "),
    ("19, not a schema", grammar("json", {"properties": []}), "grammar is not valid: "),
    (
        "20",
        grammar("json", {"properties": {"a": {"$ref": "#/$defs/absent"}}}),
        "cannot compile regex from schema: ",
    ),
    ("bad regex", grammar("regex", "(["), "grammar is not valid: "),
]
ONLY_WHOLE = [
    ("0b", {"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ("0b before all", {"best_of": 3, "temperature": 0}, "`best_of` must be > 0 and <= 2. Given: 3"),
]
ONLY_STREAMED = [
    ("0c", {"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
    ("0c, zero", {"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
    ("0c before all", {"best_of": 3, "temperature": 0}, "`best_of` != 1 is not supported when streaming tokens"),
    (
        "0d",
        {"decoder_input_details": True},
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
]


def refusal(text: str) -> dict:
    return {"error": "Input validation error: " + text, "error_type": "validation"}


def assert_refused_whole(http: httpx.Client, inputs: str, parameters: dict, body: dict) -> None:
    for path in ("/generate", "/", "/invocations"):
        answer = http.post(path, json={"inputs": inputs, "parameters": parameters})
        assert (answer.status_code, answer.json()) == (422, body), path
        assert answer.headers["content-type"] == "application/json"
        assert not any(name.startswith(("x-compute", "x-total", "x-prompt")) for name in answer.headers)


def assert_refused_streamed(http: httpx.Client, inputs: str, parameters: dict, body: dict) -> None:
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        answer = http.post(path, json={"inputs": inputs, "parameters": parameters, **more})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert read_events(answer.content) == [body], path


@pytest.mark.parametrize(("row", "parameters", "inputs", "text"), COMMON, ids=lambda value: str(value)[:40])
def test_table(http: httpx.Client, row: str, parameters: dict, inputs: str, text: str) -> None:
    assert_refused_whole(http, inputs, parameters, refusal(text))
    if "best_of" not in parameters:
        assert_refused_streamed(http, inputs, parameters, refusal(text))
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(("row", "parameters", "start"), OPEN_ENDED, ids=lambda value: str(value)[:40])
def test_table_with_open_ends(http: httpx.Client, row: str, parameters: dict, start: str) -> None:
    answer = http.post("/generate", json={"inputs": "a", "parameters": parameters})
    body = answer.json()
    assert (answer.status_code, body["error_type"]) == (422, "validation"), body
    assert body["error"].startswith("Input validation error: " + start), body
    assert len(body["error"]) > len("Input validation error: " + start) + 3  # there is a reason
    assert_refused_streamed(http, "a", parameters, body)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(("row", "parameters", "text"), ONLY_WHOLE, ids=lambda value: str(value)[:40])
def test_best_of_of_whole_answers(http: httpx.Client, row: str, parameters: dict, text: str) -> None:
    assert_refused_whole(http, "a", parameters, refusal(text))


@pytest.mark.parametrize(("row", "parameters", "text"), ONLY_STREAMED, ids=lambda value: str(value)[:40])
def test_best_of_and_prefill_of_streams(http: httpx.Client, row: str, parameters: dict, text: str) -> None:
    assert_refused_streamed(http, "a", parameters, refusal(text))


def test_row_17_input_of_exactly_the_total(http: httpx.Client) -> None:
    """Without `max_new_tokens` no room is asked for, so only the input's own limit refuses it."""
    inputs = "a" + " a" * (MAX_TOTAL - 1)
    assert num_tokens(http, inputs) == MAX_TOTAL
    expected = refusal(f"`inputs` must have less than {MAX_INPUT} tokens. Given: {MAX_TOTAL}")
    assert_refused_whole(http, inputs, {}, expected)
    assert_refused_streamed(http, inputs, {}, expected)


def test_the_first_failure_wins(http: httpx.Client) -> None:
    """Each row together with every later one: its own text comes. Row 1 aside: many later ones turn sampling on."""
    rows = [(parameters, text) for row, parameters, inputs, text in COMMON if inputs == "a" and row != "1"]
    for place, (parameters, text) in enumerate(rows):
        for later, _ in rows[place + 1 :]:
            if not parameters.keys() & later.keys():
                answer = http.post("/generate", json={"inputs": "a", "parameters": {**later, **parameters}})
                assert (answer.status_code, answer.json()) == (422, refusal(text)), (parameters, later)


def test_lengths_come_before_grammars(http: httpx.Client) -> None:
    body = {"inputs": LONG, "parameters": grammar("json", 5)}
    assert "tokens + `max_new_tokens`" in http.post("/generate", json=body).json()["error"]


# -- what is accepted at the borders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 0},
        {"best_of": 1},
        {"best_of": 2, "do_sample": True},
        {"best_of": 2, "temperature": 1.0},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"seed": 0, "do_sample": True},
        {"seed": 2**64 - 1, "do_sample": True},
        {"top_n_tokens": 0},
        {"top_n_tokens": 5},
        {"truncate": MAX_INPUT},
        {"stop": list("wxyz")},
        {"top_k": 2**31 - 1},
        {"temperature": 1e-3},
        {"temperature": 100.0},
        {"adapter_id": "no-such-adapter"},
        {"stop_sequences": list("abcdefgh")},  # not a field of TGI: ignored
        {"an_unknown_field": {"of": ["any", "kind"]}},
    ],
    ids=str,
)
def test_accepted(http: httpx.Client, parameters: dict) -> None:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 1, **parameters}, "unknown": [1]}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert isinstance(answer.json()["generated_text"], str)


def test_only_the_first_chunk_of_new_tokens_must_fit(server: Server) -> None:
    """The shared server holds 1024 tokens, so a chunk of 1024 fits nowhere; without a limit the room is the limit."""
    with server.client() as http:
        inputs = "a" + " a" * (MAX_TOTAL - 6)
        body = {"inputs": inputs, "parameters": {"details": True}}
        details = http.post("/generate", json=body).json()["details"]
        assert (details["finish_reason"], details["generated_tokens"]) == ("length", 5)


# -- the framework's errors ----------------------------------------------------------------------------------------

POST_ROUTES = ["/", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize", "/vertex", "/invocations"]


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize("kind", [None, "text/plain", "application/jsonx", "multipart/form-data; boundary=json"])
def test_content_type_must_be_json(http: httpx.Client, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post(path, content=b'{"inputs":"a"}', headers=headers)
    assert answer.status_code == 415
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "Expected request with `Content-Type: application/json`"


@pytest.mark.parametrize("kind", ["application/json", "APPLICATION/JSON; charset=utf-8", "application/vnd.x+json"])
def test_content_types_that_are_json(http: httpx.Client, kind: str) -> None:
    body = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 1}})
    assert http.post("/generate", content=body, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"inputs":', b"{'inputs':'a'}", b"nonsense", b'{"inputs":"a","messages":[]} x']
)
def test_not_json(http: httpx.Client, path: str, content: bytes) -> None:
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.startswith("Failed to parse the request body as JSON: ")


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/generate", {}, "missing field `inputs`"),
        ("/generate_stream", {}, "missing field `inputs`"),
        ("/", {}, "missing field `inputs`"),
        ("/tokenize", {}, "missing field `inputs`"),
        ("/chat_tokenize", {}, "missing field `messages`"),
        ("/vertex", {}, "missing field `instances`"),
        ("/vertex", {"instances": [{}]}, "missing field `inputs`"),
        ("/invocations", {}, "data did not match any variant of untagged enum SagemakerRequest"),
        ("/generate", [], "Expected `object`, got `array`"),
        ("/generate", {"inputs": 1}, "inputs: "),
        ("/generate", {"inputs": "a", "parameters": {"temperature": "hot"}}, "parameters.temperature: "),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1.5}}, "parameters.max_new_tokens: "),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": -1}}, "parameters.max_new_tokens: "),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2**32}}, "parameters.max_new_tokens: "),
        ("/generate", {"inputs": "a", "parameters": {"top_k": 2**31}}, "parameters.top_k: "),
        ("/generate", {"inputs": "a", "parameters": {"seed": 2**64}}, "parameters"),
        ("/generate", {"inputs": "a", "parameters": {"seed": -1}}, "parameters.seed: "),
        ("/generate", {"inputs": "a", "parameters": {"stop": "END"}}, "parameters.stop: "),
        ("/generate", {"inputs": "a", "parameters": {"stop": [1]}}, "parameters.stop[0]: "),
        ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "json"}}}, "parameters.grammar: "),
        ("/generate", {"inputs": "a", "parameters": grammar("yaml", {})}, "parameters.grammar.type: "),
        ("/generate", {"inputs": "a", "parameters": grammar("regex", 5)}, "parameters.grammar: "),
        ("/generate", {"inputs": "a", "parameters": grammar("json_schema", SCHEMA)}, "parameters.grammar: "),
        ("/generate_stream", {"inputs": "a", "parameters": {"stop": "END"}}, "parameters.stop: "),
    ],
    ids=str,
)
def test_wrong_shape(http: httpx.Client, path: str, body: object, detail: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text.startswith("Failed to deserialize the JSON body into the target type: " + detail), answer.text


@pytest.mark.parametrize(
    "name",
    ["do_sample", "stop", "watermark", "details", "decoder_input_details"],
)
def test_null_that_is_refused(http: httpx.Client, name: str) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        answer = http.post(path, json={"inputs": "a", "parameters": {name: None}})
        assert answer.status_code == 422
        expected = f"Failed to deserialize the JSON body into the target type: parameters.{name}: "
        assert answer.text.startswith(expected)


def test_null_members_that_are_refused(http: httpx.Client) -> None:
    for path, body in (("/generate", {"parameters": None}), ("/", {"parameters": None}), ("/", {"stream": None})):
        assert http.post(path, json={"inputs": "a", **body}).status_code == 422, body


def test_null_means_unset(http: httpx.Client) -> None:
    names = [
        "best_of",
        "temperature",
        "repetition_penalty",
        "frequency_penalty",
        "top_n_sigma",
        "top_k",
        "top_p",
        "typical_p",
        "return_full_text",
        "truncate",
        "seed",
        "top_n_tokens",
        "grammar",
        "adapter_id",
    ]
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3, **dict.fromkeys(names)}}
    plain = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json() == http.post("/generate", json=plain).json()
    truncated = {"inputs": "a" + " a" * 1020, "parameters": {"max_new_tokens": None, "details": True}}
    assert http.post("/generate", json=truncated).json()["details"]["generated_tokens"] <= 3


# -- other application errors --------------------------------------------------------------------------------------


def test_vertex_without_instances(http: httpx.Client) -> None:
    answer = http.post("/vertex", json={"instances": []})
    expected = {"error": "Input validation error", "error_type": "Input validation error"}
    assert (answer.status_code, answer.json()) == (422, expected)


def test_any_failure_of_vertex_and_kserve(http: httpx.Client) -> None:
    expected = {"error": "Incomplete generation", "error_type": "Incomplete generation"}
    good = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for bad in ({"inputs": ""}, {"inputs": "a", "parameters": {"max_new_tokens": 0}}, {"inputs": LONG}):
        answer = http.post("/vertex", json={"instances": [good, bad, good]})
        assert (answer.status_code, answer.json()) == (500, expected)
    data = {"name": "x", "shape": [1], "datatype": "BYTES", "data": []}
    body = {"id": "1", "inputs": [data], "outputs": [{"name": "y"}]}
    answer = http.post("/v2/models/m/versions/1/infer", json=body)
    assert (answer.status_code, answer.json()) == (500, expected)
    assert http.post("/vertex", json={"instances": [good]}).status_code == 200


def test_kserve_refusals(http: httpx.Client) -> None:
    data = {"name": "x", "shape": [1], "datatype": "BYTES", "data": [255, 254]}
    path = "/v2/models/m/versions/1/infer"
    answer = http.post(path, json={"id": "1", "inputs": [data], "outputs": [{"name": "y"}]})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "utf8")
    answer = http.post(path, json={"id": "1", "inputs": [data], "outputs": []})
    expected = {"error": "Inputs and outputs length mismatch", "error_type": "length mismatch"}
    assert (answer.status_code, answer.json()) == (422, expected)
    assert http.post(path, json={"id": "1", "inputs": [{**data, "data": [256]}], "outputs": []}).status_code == 422


def test_tokenize_of_nothing(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"inputs": ""})
    assert (answer.status_code, answer.json()) == (200, [])
    answer = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": ""}]})
    assert answer.status_code == 200
    assert answer.json()["tokenize_response"]


def test_template_errors(http: httpx.Client) -> None:
    """The embedded model's template takes any role; a variable that breaks it shows the shape of the error."""
    answer = http.post("/chat_tokenize", json={"messages": []})
    assert answer.status_code == 422
    assert answer.json()["error_type"] in ("validation", "template_error")
