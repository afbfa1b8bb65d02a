"""TGI's own routes on the real server: shapes, order of keys, bytes of streams, headers, and what parameters do."""

import json
import math
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx2 as httpx
import pytest
from events import encode_like_serde, read_events
from serving import NUM_RANKS, Server

from text_generation_inference import LLM, SamplingParams
from text_generation_inference.text.tokenizer import Tokenizer

COUNT = "Count: one, two,"  # greedy: " three, four, five, six, ..."
EMOJI = "Emoji: 😀😃😄"  # greedy: emoji of three tokens each
TOKEN_KEYS = ["id", "text", "logprob", "special"]
TIMING_HEADERS = [
    "x-compute-type",
    "x-compute-time",
    "x-compute-characters",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-prompt-tokens",
    "x-generated-tokens",
]


def generate(http: httpx.Client, inputs: str, **parameters: object) -> dict:
    answer = http.post("/generate", json={"inputs": inputs, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(http: httpx.Client, inputs: str, **parameters: object) -> list[dict]:
    answer = http.post("/generate_stream", json={"inputs": inputs, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return read_events(answer.content)


def ids(tokens: list[dict]) -> list[int]:
    """Log-probabilities differ in the last digits with what else is in the batch or the cache; tokens do not."""
    return [token["id"] for token in tokens]


@pytest.fixture(scope="module")
def llm(model_cache: Path) -> Iterator[LLM]:
    with LLM(cache_dir=str(model_cache), max_batch_total_tokens=4096, max_total_tokens=1024, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    return llm.tokenizer


# -- whole answers -------------------------------------------------------------------------------------------------


def test_worked_example_of_generate(http: httpx.Client) -> None:
    body = {"inputs": "2+2=", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 1}}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    found = json.loads(answer.content)
    assert answer.content.decode() == encode_like_serde(found)  # compact
    assert list(found) == ["generated_text", "details"]
    keys = ["finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens"]
    assert list(found["details"]) == keys
    details = found["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 2, None)
    assert details["prefill"] == []
    assert [list(token) for token in details["tokens"]] == [TOKEN_KEYS] * 2
    assert details["top_tokens"] == [[token] for token in details["tokens"]]  # greedy: the best one was taken
    assert "".join(token["text"] for token in details["tokens"]) == found["generated_text"]


def test_without_details(http: httpx.Client) -> None:
    assert list(generate(http, COUNT, max_new_tokens=2)) == ["generated_text"]
    assert generate(http, COUNT, max_new_tokens=4) == {"generated_text": " three, four,"}


def test_greedy_equals_the_offline_engine(http: httpx.Client, llm: LLM) -> None:
    for prompt in (COUNT, EMOJI, "The capital of France is", "def fibonacci(n):"):
        offline = llm.generate(prompt, SamplingParams(max_new_tokens=24))[0]
        details = generate(http, prompt, max_new_tokens=24, details=True)["details"]
        assert [token["id"] for token in details["tokens"]] == offline.token_ids
        found = [token["logprob"] for token in details["tokens"]]
        assert found == pytest.approx(offline.logprobs, abs=2e-3)


def test_headers_of_whole_answers(http: httpx.Client) -> None:
    inputs = "Grüße, Welt 🙂"
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 3}}
    for path in ("/generate", "/"):
        started = time.perf_counter()
        headers = http.post(path, json=body).headers
        took = time.perf_counter() - started
        assert [name for name in headers if name in TIMING_HEADERS] == TIMING_HEADERS
        assert headers["x-compute-characters"] == str(len(inputs))
        assert headers["x-prompt-tokens"] == str(len(http.post("/tokenize", json=body).json()))
        assert headers["x-generated-tokens"] == "3"
        assert 0 < float(headers["x-compute-time"]) <= took
        whole = int(headers["x-total-time"])
        assert whole == int(float(headers["x-compute-time"]) * 1000)
        parts = [int(headers[f"x-{name}-time"]) for name in ("validation", "queue", "inference")]
        assert whole - 3 <= sum(parts) <= whole
        assert int(headers["x-time-per-token"]) in (parts[2] // 3, parts[2] // 3 + 1)
        assert headers["x-compute-type"] == f"{NUM_RANKS}-cpu"


def test_do_sample_depends_on_whether_parameters_are_there(http: httpx.Client) -> None:
    """Absent: sampling. Present, even empty: greedy. Seen by the seed, which only sampling has."""
    for parameters, samples in (({}, False), ({"do_sample": True}, True), ({"temperature": 0.5}, True)):
        details = generate(http, COUNT, max_new_tokens=2, details=True, **parameters)["details"]
        assert (details["seed"] is not None) == samples, parameters
    instance = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}}
    answers = {http.post("/vertex", json={"instances": [instance]}).text for _ in range(3)}
    assert len(answers) > 1  # forced to sample as well
    long = "a" + " a" * 1000 + " Once upon a time there was"  # leaves room for a few tokens only
    for body, samples in (({"inputs": long}, True), ({"inputs": long, "parameters": {}}, False)):
        answers = {http.post("/generate", json=body).text for _ in range(3)}
        assert (len(answers) > 1) == samples


def test_seed(http: httpx.Client) -> None:
    def sample(seed: int | None) -> dict:
        parameters = {"max_new_tokens": 16, "do_sample": True, "details": True, "seed": seed}
        return generate(http, "Once upon a time", **parameters)

    first, again, other = sample(7), sample(7), sample(8)
    assert first["generated_text"] == again["generated_text"] != other["generated_text"]
    assert first["details"]["seed"] == 7
    drawn = sample(None)
    assert drawn["details"]["seed"] != sample(None)["details"]["seed"]
    assert sample(drawn["details"]["seed"])["generated_text"] == drawn["generated_text"]


def test_best_of(http: httpx.Client) -> None:
    found = generate(http, COUNT, max_new_tokens=6, best_of=2, do_sample=True, details=True, top_n_tokens=2)
    details = found["details"]
    keys = ["finish_reason", "generated_tokens", "seed", "prefill", "tokens", "best_of_sequences", "top_tokens"]
    assert list(details) == keys
    (other,) = details["best_of_sequences"]
    assert list(other) == ["generated_text", *keys[:5], "top_tokens"]
    assert details["seed"] != other["seed"]

    def mean(tokens: list[dict]) -> float:
        return sum(token["logprob"] for token in tokens) / len(tokens)

    assert mean(details["tokens"]) >= mean(other["tokens"])
    assert "".join(token["text"] for token in other["tokens"] if not token["special"]) == other["generated_text"]
    assert list(generate(http, COUNT, max_new_tokens=2, best_of=2, do_sample=True)) == ["generated_text"]


def test_top_n_tokens(http: httpx.Client) -> None:
    details = generate(http, COUNT, max_new_tokens=5, top_n_tokens=3, details=True)["details"]
    for token, tops in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(tops) >= 3
        assert tops[0] == token
        logprobs = [top["logprob"] for top in tops]
        assert logprobs == sorted(logprobs, reverse=True)
        assert [list(top) for top in tops] == [TOKEN_KEYS] * len(tops)
    events = stream(http, COUNT, max_new_tokens=5, top_n_tokens=3)
    assert [ids(event["top_tokens"]) for event in events] == [ids(tops) for tops in details["top_tokens"]]
    assert "top_tokens" not in generate(http, COUNT, max_new_tokens=2, top_n_tokens=0, details=True)["details"]


def test_logprobs_are_those_before_filters(http: httpx.Client) -> None:
    """Unlike TGI's: a filter would make every token it keeps look likelier."""
    plain = generate(http, COUNT, max_new_tokens=3, top_n_tokens=2, details=True)["details"]
    filtered = generate(http, COUNT, max_new_tokens=3, top_k=1, top_n_tokens=2, details=True)["details"]
    assert ids(plain["tokens"]) == ids(filtered["tokens"])
    for one, other in zip(plain["top_tokens"], filtered["top_tokens"], strict=True):
        assert ids(one) == ids(other)
        assert [top["logprob"] for top in one] == pytest.approx([top["logprob"] for top in other], abs=1e-3)


def test_truncate_keeps_the_last_tokens(http: httpx.Client) -> None:
    body = {"inputs": "x " * 500 + COUNT, "parameters": {"max_new_tokens": 4, "truncate": 5, "details": True}}
    tokens = http.post("/tokenize", json=body).json()
    assert len(tokens) > 500  # no effect there
    answer = http.post("/generate", json=body)
    assert answer.headers["x-prompt-tokens"] == "5"
    assert answer.json()["generated_text"] == " three, four,"
    whole = generate(http, COUNT, max_new_tokens=4, truncate=1023)
    assert whole["generated_text"] == " three, four,"


def test_return_full_text(http: httpx.Client) -> None:
    generated = " three, four,"
    for given, default_of_root in ((None, True), (False, False), (True, True)):
        parameters = {"max_new_tokens": 4} | ({} if given is None else {"return_full_text": given})
        body = {"inputs": COUNT, "parameters": parameters}
        shown = COUNT + generated if given else generated
        assert http.post("/generate", json=body).json() == {"generated_text": shown}
        assert read_events(http.post("/generate_stream", json=body).content)[-1]["generated_text"] == shown
        shown = COUNT + generated if default_of_root else generated
        assert http.post("/", json=body).json() == [{"generated_text": shown}]
        events = read_events(http.post("/", json={**body, "stream": True}).content)
        assert events[-1]["generated_text"] == shown
    # `stream` means nothing elsewhere
    assert http.post("/generate", json={**body, "stream": True}).headers["content-type"] == "application/json"


def test_watermark_changes_the_answer_and_nothing_else(http: httpx.Client) -> None:
    plain = generate(http, "Once upon a time", max_new_tokens=24, details=True)
    marked = generate(http, "Once upon a time", max_new_tokens=24, details=True, watermark=True)
    assert list(plain["details"]) == list(marked["details"])
    assert plain["generated_text"] != marked["generated_text"]


def test_penalties_and_filters_do_something(http: httpx.Client) -> None:
    plain = generate(http, COUNT, max_new_tokens=24)["generated_text"]
    assert generate(http, COUNT, max_new_tokens=24, repetition_penalty=1.8)["generated_text"] != plain
    commas = "one, two, three, four, five"
    likely, unlikely, encouraged = (
        generate(http, commas, max_new_tokens=1, details=True, frequency_penalty=penalty)["details"]["tokens"][0]
        for penalty in (0.0, 0.5, -0.5)
    )
    assert likely["text"] == unlikely["text"] == encouraged["text"] == ","
    assert unlikely["logprob"] + 0.01 < likely["logprob"] < encouraged["logprob"] - 0.01
    for parameters in ({"top_k": 1}, {"temperature": 0.001}, {"top_p": 0.001}):
        assert generate(http, COUNT, max_new_tokens=24, **parameters)["generated_text"] == plain


def test_decoder_input_details_without_the_servers_leave(http: httpx.Client) -> None:
    """They imply `details`; the prompt's tokens stay away unless the server runs with `--enable-prefill-logprobs`."""
    assert generate(http, COUNT, max_new_tokens=1, decoder_input_details=True)["details"]["prefill"] == []


# -- how an answer ends --------------------------------------------------------------------------------------------


def chat_prompt(http: httpx.Client, text: str) -> str:
    return http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": text}]}).json()["templated_text"]


def test_end_token(http: httpx.Client) -> None:
    """It counts, it is the last token and special, and its text is in the stream but not in the whole text."""
    prompt = chat_prompt(http, "Say hello in one word.")
    found = generate(http, prompt, max_new_tokens=200, details=True)
    details = found["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == len(details["tokens"])
    last = details["tokens"][-1]
    assert (last["id"], last["text"], last["special"]) == (2, "<|im_end|>", True)
    assert not any(token["special"] for token in details["tokens"][:-1])
    events = stream(http, prompt, max_new_tokens=200)
    assert ids([event["token"] for event in events]) == ids(details["tokens"])
    assert events[-1]["generated_text"] == found["generated_text"]
    assert "".join(event["token"]["text"] for event in events) == found["generated_text"] + "<|im_end|>"
    # The last token that is allowed may be the end token: the reason is still the length.
    exact = generate(http, prompt, max_new_tokens=details["generated_tokens"], details=True)["details"]
    assert exact["finish_reason"] == "length"
    assert ids(exact["tokens"]) == ids(details["tokens"])


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["four"], " three, four", "stop_sequence"),  # kept
        (["hree, f", "our,"], " three, four,", "stop_sequence"),  # over token borders, where a token ends with it
        ([" fou"], " three, four, five, six,", "length"),  # a token runs past it
        (["absent"], " three, four, five, six,", "length"),
        ([" six,", "five"], " three, four, five", "stop_sequence"),
    ],
)
def test_stop_strings(http: httpx.Client, stop: list[str], text: str, reason: str) -> None:
    found = generate(http, COUNT, max_new_tokens=8, stop=stop, details=True)
    assert (found["generated_text"], found["details"]["finish_reason"]) == (text, reason)
    events = stream(http, COUNT, max_new_tokens=8, stop=stop, details=True)
    assert "".join(event["token"]["text"] for event in events) == text
    assert events[-1]["details"]["finish_reason"] == reason
    assert ids([event["token"] for event in events]) == ids(found["details"]["tokens"])


def test_a_newline_behind_a_stop_string(http: httpx.Client) -> None:
    """A token that ends with the stop string and one newline still counts; the newline stays."""
    prompt = "a\nb.\nc.\nd.\ne.\nf"
    whole = generate(http, prompt, max_new_tokens=8, details=True)
    index, token = next(
        (i, t) for i, t in enumerate(whole["details"]["tokens"]) if t["text"] == "\n" and i > 0
    )  # a lone newline: the text before it, with the newline, ends with "." + "\n"
    before = "".join(t["text"] for t in whole["details"]["tokens"][:index])
    found = generate(http, prompt, max_new_tokens=8, stop=[before[-1] + "\n"], details=True)
    assert found["generated_text"] == before + token["text"]
    assert found["details"]["finish_reason"] == "stop_sequence"


def test_special_tokens_count_for_stop_strings(http: httpx.Client) -> None:
    prompt = chat_prompt(http, "Say hello in one word.")
    plain = generate(http, prompt, max_new_tokens=200, details=True)
    stopped = generate(http, prompt, max_new_tokens=200, stop=["<|im_end|>"], details=True)
    assert stopped["generated_text"] == plain["generated_text"]
    assert ids(stopped["details"]["tokens"]) == ids(plain["details"]["tokens"])
    assert stopped["details"]["finish_reason"] in ("eos_token", "stop_sequence")


# -- streams -------------------------------------------------------------------------------------------------------


def test_worked_example_of_generate_stream(http: httpx.Client) -> None:
    """Byte for byte: the values come from our model, everything else from the reference."""
    body = {"inputs": "2+2=", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 1}}
    answer = http.post("/generate_stream", json=body)
    assert answer.headers["content-type"] == "text/event-stream"
    events = read_events(answer.content)
    assert ids([event["token"] for event in events]) == ids(
        http.post("/generate", json=body).json()["details"]["tokens"]
    )
    first, second = (encode_like_serde(event["token"]) for event in events)
    text = encode_like_serde("".join(event["token"]["text"] for event in events))
    length = len(http.post("/tokenize", json=body).json())
    expected = (
        f'data: {{"index":1,"token":{first},"top_tokens":[{first}],"generated_text":null,"details":null}}\n\n'
        f'data: {{"index":2,"token":{second},"top_tokens":[{second}],"generated_text":{text},'
        f'"details":{{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":{length}}}}}\n\n'
    )
    assert answer.content.decode() == expected


def test_worked_example_of_an_error_in_a_stream(http: httpx.Client) -> None:
    body = {"inputs": "2+2=", "parameters": {"max_new_tokens": 2, "temperature": 0}}
    answer = http.post("/generate_stream", json=body)
    expected = (
        'data: {"error":"Input validation error: `temperature` must be strictly positive","error_type":"validation"}'
    )
    assert (answer.status_code, answer.text) == (200, expected + "\n\n")


def test_headers_of_streams(http: httpx.Client) -> None:
    inputs = "Grüße 🙂"
    for path, more in (("/generate_stream", {}), ("/", {"stream": True})):
        answer = http.post(path, json={"inputs": inputs, "parameters": {"max_new_tokens": 1}, **more})
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-compute-characters"] == str(len(inputs))
        assert [name for name in answer.headers if name in TIMING_HEADERS] == ["x-compute-type", "x-compute-characters"]


def test_stream_without_extras(http: httpx.Client) -> None:
    answer = http.post("/generate_stream", json={"inputs": COUNT, "parameters": {"max_new_tokens": 3}})
    events = read_events(answer.content)
    assert [event["index"] for event in events] == [1, 2, 3]
    assert [list(event) for event in events] == [["index", "token", "generated_text", "details"]] * 3
    assert [event["generated_text"] for event in events] == [None, None, " three, four"]
    assert [event["details"] for event in events] == [None] * 3


def test_unfinished_characters_are_held_back(http: httpx.Client) -> None:
    """Events of an unfinished character have no text; the one that completes it has all of it."""
    for count in range(1, 8):
        events = stream(http, EMOJI, max_new_tokens=count)
        texts = [event["token"]["text"] for event in events]
        assert len(texts) == count
        assert all("\ufffd" not in text for text in texts)
        whole = events[-1]["generated_text"]
        assert whole == generate(http, EMOJI, max_new_tokens=count)["generated_text"]
        assert whole.rstrip("\ufffd") == "".join(texts)
    assert "" in texts
    assert any(len(text) == 1 and ord(text) > 0xFFFF for text in texts)


def test_seeded_stream_equals_the_whole_answer(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 12, "do_sample": True, "seed": 11, "temperature": 0.8, "details": True}
    events = stream(http, "Once upon a time", **parameters)
    whole = generate(http, "Once upon a time", **parameters)
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert [event["token"]["id"] for event in events] == [token["id"] for token in whole["details"]["tokens"]]
    assert events[-1]["details"]["seed"] == 11


def test_events_come_while_the_model_works(http: httpx.Client) -> None:
    """The first event is here before the last one exists."""
    body = {"inputs": COUNT, "parameters": {"max_new_tokens": 80}}
    with http.stream("POST", "/generate_stream", json=body) as answer:
        pieces = answer.iter_raw()
        first = next(pieces)
        assert first.startswith(b'data: {"index":1,')
        assert b'"index":80' not in first
        running = http.get("/metrics").text
        rest = b"".join(pieces)
    assert "tgi_batch_current_size 1" in running, "the request had ended before its first event was seen"
    assert b'"index":80' in rest


# -- grammars ------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": PERSON},
        {"type": "json", "value": json.dumps(PERSON)},
        {"type": "json_object", "value": PERSON},
        {"type": "json_schema", "value": {"name": "person", "schema": PERSON}},
    ],
    ids=lambda grammar: f"{grammar['type']}-{type(grammar['value']).__name__}",
)
def test_json_grammar(http: httpx.Client, grammar: dict) -> None:
    parameters = {"max_new_tokens": 80, "grammar": grammar, "details": True}
    found = generate(http, "A person as JSON:", **parameters)
    value = json.loads(found["generated_text"])
    assert list(value) == ["name", "age"]
    assert isinstance(value["name"], str)
    assert isinstance(value["age"], int)
    assert found["details"]["finish_reason"] == "eos_token"
    events = stream(http, "A person as JSON:", **parameters)
    assert events[-1]["generated_text"] == found["generated_text"]


def test_regex_grammar(http: httpx.Client) -> None:
    grammar = {"type": "regex", "value": r"\d{3}-\d{4}"}
    for more in ({}, {"do_sample": True, "seed": 3, "temperature": 1.5}):
        text = generate(http, "My phone number is ", max_new_tokens=30, grammar=grammar, **more)["generated_text"]
        assert len(text) == 8
        assert text[3] == "-"
        assert (text[:3] + text[4:]).isdecimal()


# -- tokens --------------------------------------------------------------------------------------------------------


def test_tokenize_gives_byte_offsets(http: httpx.Client, tokenizer: Tokenizer) -> None:
    for text in ("Hello wörld 🙂<|im_end|>x", "日本語", "plain ascii", "\x00\t\n", "e\u0301"):
        data = text.encode()
        tokens = http.post("/tokenize", json={"inputs": text}).json()
        assert [token["id"] for token in tokens] == tokenizer.encode(text, True)
        covered = 0
        for token in tokens:
            assert list(token) == ["id", "text", "start", "stop"]
            assert token["start"] <= covered <= token["stop"] or token["start"] == covered
            assert token["text"] == data[token["start"] : token["stop"]].decode(errors="replace")
            covered = token["stop"]
        assert covered == len(data)


def test_tokenize_takes_a_body_of_generate(http: httpx.Client) -> None:
    body = {"inputs": "a b", "parameters": {"truncate": 1, "max_new_tokens": 1}, "x": 1}
    assert len(http.post("/tokenize", json=body).json()) == 2
    # Longer than the model takes, and long enough to be worked on beside the event loop.
    assert len(http.post("/tokenize", json={"inputs": "a" + " a" * 5000}).json()) == 5001


def test_chat_tokenize(http: httpx.Client, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi ü"}]
    answer = http.post("/chat_tokenize", json={"messages": messages, "an_unknown_field": 1})
    found = answer.json()
    assert list(found) == ["tokenize_response", "templated_text"]
    assert found["templated_text"] == llm.render_chat(messages)
    ids = [token["id"] for token in found["tokenize_response"]]
    assert ids == llm.tokenizer.encode(found["templated_text"], False)
    assert not any(name in TIMING_HEADERS for name in answer.headers)


def test_added_tokens_in_prompts_are_those_tokens(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """As TGI: the text of a special token in a prompt is that token."""
    for token_id in sorted(tokenizer.special_ids):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        found = http.post("/tokenize", json={"inputs": f"a{text}b"}).json()
        assert token_id in [token["id"] for token in found]
        assert http.post("/generate", json={"inputs": text, "parameters": {"max_new_tokens": 1}}).status_code == 200


# -- what the server tells -----------------------------------------------------------------------------------------


def test_info(http: httpx.Client) -> None:
    found = http.get("/info").json()
    assert found == {
        "model_id": "embedded",
        "model_sha": found["model_sha"],
        "model_pipeline_tag": found["model_pipeline_tag"],
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_input_tokens": 1023,
        "max_total_tokens": 1024,
        "validation_workers": 2,
        "max_client_batch_size": 4,
        "router": "text-generation-router",
        "version": "3.3.6",  # TGI's, which clients look at to know what they may ask for
        "sha": None,
        "docker_label": None,
        "server_version": version("text-generation-inference"),
        **({"num_shard": NUM_RANKS} if NUM_RANKS > 1 else {}),
    }
    keys = "model_id model_sha model_pipeline_tag max_concurrent_requests max_best_of max_stop_sequences"
    keys += (
        " max_input_tokens max_total_tokens validation_workers max_client_batch_size router version sha"
        " docker_label server_version"
    )
    keys += " num_shard" if NUM_RANKS > 1 else ""
    assert " ".join(found) == keys


def test_models(http: httpx.Client) -> None:
    model = {"id": "embedded", "object": "model", "created": 0, "owned_by": "embedded"}
    assert http.get("/v1/models").json() == {"object": "list", "data": [model]}
    assert http.get("/v1/models/embedded").json() == model


@pytest.mark.parametrize("path", ["/", "/health", "/ping"])
def test_health(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_documents(http: httpx.Client) -> None:
    for path in ("/docs", "/docs/", "/docs/index.html"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
    document = http.get("/api-doc/openapi.json")
    assert document.headers["content-type"] == "application/json"
    assert document.json()["openapi"].startswith("3.")
    assert http.get("/metrics").headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/nothing", "/generate/", "/docs2", "/v2/models/m", "/health/x", "/%00"])
def test_unknown_paths(http: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        answer = http.request(method, path)
        assert (answer.status_code, answer.content) == (404, b"")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/generate", "POST"),
        ("POST", "/health", "GET"),
        ("DELETE", "/", "GET,POST"),
        ("PUT", "/info", "GET"),
        ("HEAD", "/generate", "POST"),
        ("OPTIONS", "/generate", "POST"),
        ("GET", "/v2/models/m/versions/1/infer", "POST"),
        ("PATCH", "/tokenize", "POST"),
    ],
)
def test_wrong_methods(http: httpx.Client, method: str, path: str, allowed: str) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.content) == (405, b"")
    assert set(answer.headers["allow"].split(",")) - {"HEAD"} == set(allowed.split(","))


@pytest.mark.parametrize("path", ["/", "/health", "/info", "/v1/models", "/metrics", "/docs", "/api-doc/openapi.json"])
def test_head(http: httpx.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers.get("content-type") == whole.headers.get("content-type")
    if path != "/metrics":
        assert head.headers["content-length"] == whole.headers["content-length"]


# -- headers common to all routes ----------------------------------------------------------------------------------


def test_cors_for_any_origin(http: httpx.Client) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    answer = http.options("/generate", headers={**headers, "access-control-request-headers": "content-type"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert set(answer.headers["access-control-allow-methods"].split(",")) == {"GET", "POST", "DELETE"}
    allowed = answer.headers["access-control-allow-headers"].split(",")
    assert {"content-type", "authorization", "x-api-key", "anthropic-version"} <= set(allowed)
    for answer in (
        http.get("/info", headers={"origin": "https://a.example"}),
        http.post("/generate_stream", json={"inputs": ""}, headers={"origin": "https://a.example"}),
        http.post("/generate", json={}),
        http.get("/nothing"),
    ):
        assert answer.headers["access-control-allow-origin"] == "*"


def test_request_ids(http: httpx.Client) -> None:
    for path in ("/health", "/nothing", "/v1/nothing"):
        assert http.get(path, headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for path in ("/generate", "/generate_stream"):
        assert http.post(path, json=body, headers={"x-request-id": "x" * 128}).headers["x-request-id"] == "x" * 128
    made = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("", "a b", "x" * 129, "ü".encode()):
        found = http.get(
            "/health", headers=[(b"x-request-id", bad if isinstance(bad, bytes) else bad.encode())]
        ).headers["x-request-id"]
        assert found not in ("", bad)
        assert found.isalnum()


# -- cloud routes --------------------------------------------------------------------------------------------------


def test_invocations_dispatch(http: httpx.Client) -> None:
    native = http.post("/invocations", json={"inputs": COUNT, "parameters": {"max_new_tokens": 2}})
    assert native.json() == [{"generated_text": COUNT + " three,"}]
    assert native.headers["x-generated-tokens"] == "2"
    streamed = {"inputs": COUNT, "parameters": {"max_new_tokens": 2}, "stream": True}
    assert len(read_events(http.post("/invocations", json=streamed).content)) == 2
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert http.post("/invocations", json=chat).json()["object"] == "chat.completion"
    assert read_events(http.post("/invocations", json={**chat, "stream": True}).content)[-1] == "[DONE]"
    completion = {"prompt": COUNT, "max_tokens": 2, "temperature": 0}
    assert http.post("/invocations", json=completion).json()["choices"][0]["text"] == " three,"
    # The first form that fits wins, and what another has is ignored.
    assert isinstance(http.post("/invocations", json={**chat, **streamed, "stream": False}).json(), list)
    both = http.post("/invocations", json={**chat, "inputs": 5, "anything": 1})
    assert both.json()["object"] == "chat.completion"


def test_invocations_say_what_does_not_fit(http: httpx.Client) -> None:
    answer = http.post("/invocations", json={"inputs": "a", "parameters": {"max_new_tokens": "x"}})
    assert answer.status_code == 422
    assert "parameters.max_new_tokens" in answer.text


def test_vertex(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 8, "seed": 3}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    instances = [
        {"inputs": COUNT, "parameters": parameters},
        chat,
        {"inputs": COUNT, "parameters": {**parameters, "temperature": 0, "stop": 5, "return_full_text": True}},
    ]
    answer = http.post("/vertex", json={"instances": instances, "parameters": {"x": 1}})
    assert answer.status_code == 200, answer.text
    assert list(answer.json()) == ["predictions"]
    first, greeting, third = answer.json()["predictions"]
    sampled = generate(http, COUNT, max_new_tokens=8, seed=3, do_sample=True)["generated_text"]
    assert first == third == sampled  # other parameters have no effect
    whole = http.post("/v1/chat/completions", json=chat).json()
    assert greeting == whole["choices"][0]["message"]["content"]
    assert not any(name in TIMING_HEADERS for name in answer.headers)


def test_kserve(http: httpx.Client) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/m/versions/1/ready"):
        assert http.get(path).json() == {"live": True}
    metadata = http.get("/v2").json()
    assert metadata == {
        "name": "text-generation-inference",
        "version": "3.3.6",
        "extensions": ["health", "models", "metrics"],
    }
    model = http.get("/v2/models/my%20model/versions/7").json()
    assert model == {"name": "my model", "version": "7", "extensions": ["infer", "ready"]}


def test_kserve_infer(http: httpx.Client) -> None:
    def tensor(text: str) -> dict:
        return {"name": "in", "shape": [1], "datatype": "BYTES", "data": list(text.encode())}

    body = {
        "id": "7",
        "parameters": {"max_new_tokens": 6, "seed": 3},
        "inputs": [tensor(COUNT), tensor("Grüße")],
        "outputs": [{"name": "one"}, {"name": "two"}],
    }
    found = http.post("/v2/models/m/versions/1/infer", json=body).json()
    assert list(found) == ["id", "outputs"]
    assert found["id"] == "7"
    for output, name, prompt in zip(found["outputs"], ("one", "two"), (COUNT, "Grüße"), strict=True):
        text = generate(http, prompt, max_new_tokens=6, seed=3, do_sample=True)["generated_text"]
        data = list(text.encode())
        assert output == {"name": name, "shape": [1, len(data)], "datatype": "BYTES", "data": data}


def test_log_tells_no_prompts(server: Server) -> None:
    secret = "xyzzyplugh"
    with server.client() as http:
        generate(http, secret, max_new_tokens=1)
        http.post("/generate", json={"inputs": secret, "parameters": {"temperature": 0}})
        http.post("/generate", content=secret, headers={"content-type": "application/json"})
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": secret}], "max_tokens": 1})
    assert secret not in server.log


def test_logprobs_are_float32_in_shortest_form(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"inputs": COUNT, "parameters": {"max_new_tokens": 20, "details": True}})
    texts = [part.split(",")[0] for part in answer.text.split('"logprob":')[1:]]
    assert len(texts) == 20
    assert all(len(text.lstrip("-0.").replace(".", "")) <= 9 for text in texts)
    assert all(math.isfinite(float(text)) and float(text) <= 0 for text in texts)
