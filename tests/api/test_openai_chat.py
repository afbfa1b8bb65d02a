"""`/v1/chat/completions`: answers, streams, choices, log-probabilities, sampling."""

import re

import httpx2 as httpx
import pytest
from events import read_events
from openai_calls import (
    CHAT,
    COMPLETIONS,
    COUNT,
    HELLO,
    TOOLS,
    chat,
    complete,
    joined,
    reasons,
    refused,
    stream,
)


def test_chat_answer(http: httpx.Client) -> None:
    found = chat(http, temperature=0, max_tokens=100)
    keys = ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert list(found) == keys
    assert found["object"] == "chat.completion"
    assert re.fullmatch(r"chatcmpl-\w{10,}", found["id"])
    assert found["model"] == "embedded"
    (choice,) = found["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "stop")
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert "<|im_end|>" not in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    usage = found["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    rendered = http.post("/chat_tokenize", json={"messages": HELLO}).json()
    assert usage["prompt_tokens"] == len(rendered["tokenize_response"])
    native = {"inputs": rendered["templated_text"], "parameters": {"max_new_tokens": 100, "details": True}}
    same = http.post("/generate", json=native).json()
    assert choice["message"]["content"] == same["generated_text"]
    assert usage["completion_tokens"] == same["details"]["generated_tokens"]  # the end token counts


def test_chat_headers(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
    prompt = http.post("/chat_tokenize", json={"messages": HELLO}).json()["templated_text"]
    assert answer.headers["x-compute-characters"] == str(len(prompt))
    assert answer.headers["x-generated-tokens"] == "2"
    assert float(answer.headers["x-compute-time"]) > 0
    streamed = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "stream": True})
    assert streamed.headers["x-compute-characters"] == str(len(prompt))
    assert "x-generated-tokens" not in streamed.headers


def test_chat_stream(http: httpx.Client) -> None:
    chunks = stream(http, CHAT, temperature=0, max_tokens=100)
    whole = chat(http, temperature=0, max_tokens=100)["choices"][0]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert list(chunk) == ["object", "id", "created", "model", "system_fingerprint", "choices"]
        assert chunk["object"] == "chat.completion.chunk"
        assert list(chunk["choices"][0]) == ["index", "delta", "logprobs", "finish_reason"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(list(delta) == ["role", "content"] and delta["role"] == "assistant" for delta in deltas)
    assert deltas[0]["content"] == deltas[-1]["content"] == ""
    assert "".join(delta["content"] for delta in deltas) == whole["message"]["content"]  # as TGI's examples append it
    assert reasons(chunks) == [whole["finish_reason"]] == ["stop"]


def test_usage_in_streams(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        plain = stream(http, path, max_tokens=3)
        assert all("usage" not in chunk for chunk in plain)
        chunks = stream(http, path, max_tokens=3, stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        last = chunks[-1]
        assert last["choices"] == []
        usage = last["usage"]
        assert usage["completion_tokens"] == 3
        assert usage["total_tokens"] == usage["prompt_tokens"] + 3
        assert all("usage" not in chunk for chunk in stream(http, path, max_tokens=1, stream_options=None))


@pytest.mark.parametrize(
    "more",
    [{"logprobs": True}, {"tools": "some"}, {"tools": "some", "logprobs": True}, {"n": 2}, {"stop": "e"}],
    ids=str,
)
def test_every_text_delta_can_be_appended(http: httpx.Client, more: dict) -> None:
    """Whatever else a chunk carries, and where a parser for calls reads the text first."""
    body = {"temperature": 0, "max_tokens": 12, **more, **({"tools": TOOLS} if "tools" in more else {})}
    choices = [choice for chunk in stream(http, CHAT, **body) for choice in chunk["choices"]]
    for choice in choices:
        delta = choice["delta"]
        assert delta["role"] == "assistant"
        assert ("tool_calls" in delta and "content" not in delta) or isinstance(delta["content"], str)
    assert choices[-1]["finish_reason"]


def test_options_of_streams_may_be_null(http: httpx.Client) -> None:
    """Unlike TGI, which refuses it; OpenAI's clients send it. It is as if nothing were said."""
    for path in (CHAT, COMPLETIONS):
        for options in (None, {}, {"include_usage": False}):
            chunks = stream(http, path, max_tokens=2, stream_options=options)
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        base = {"messages": HELLO} if path == CHAT else {"prompt": COUNT}
        assert http.post(path, json={**base, "max_tokens": 1, "stream_options": None}).status_code == 200


def test_seeded_streams_concatenate_to_the_whole_text(http: httpx.Client) -> None:
    for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"stop": [" the", "!"]}, {"n": 3}):
        body = {"seed": 5, "temperature": 0.9, "max_tokens": 24, **more}
        whole = chat(http, **body)
        chunks = stream(http, CHAT, **body)
        for choice in whole["choices"]:
            assert joined(chunks, choice["index"]) == choice["message"]["content"]
            assert reasons(chunks, choice["index"]) == [choice["finish_reason"]]


def test_seeds(http: httpx.Client) -> None:
    texts = [chat(http, seed=seed, max_tokens=12)["choices"][0]["message"]["content"] for seed in (1, 1, 2, -1, -1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]


def test_several_choices(http: httpx.Client) -> None:
    found = chat(http, n=3, seed=4, max_tokens=12, temperature=1.2)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in found["choices"]}) > 1
    assert found["usage"]["completion_tokens"] == 3 * 12
    alone = chat(http, max_tokens=12)["usage"]
    assert found["usage"]["prompt_tokens"] == alone["prompt_tokens"]  # told once
    assert len(chat(http, n=None, max_tokens=1)["choices"]) == 1
    for bad in (0, 129, 10_000):
        assert refused(http, CHAT, n=bad)["param"] == "n"


def test_chat_logprobs(http: httpx.Client) -> None:
    body = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    whole = chat(http, **body)["choices"][0]
    entries = whole["logprobs"]["content"]
    assert len(entries) == 6
    for entry in entries:
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert [list(top) for top in entry["top_logprobs"]] == [["token", "logprob", "bytes"]] * 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])
        assert entry["logprob"] <= 0
    assert "".join(entry["token"] for entry in entries) == whole["message"]["content"]
    chunks = stream(http, CHAT, **body)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    plain = chat(http, temperature=0, max_tokens=3, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[], [], []]
    assert chat(http, max_tokens=1, top_logprobs=2)["choices"][0]["logprobs"] is None
    assert len(chat(http, max_tokens=1, logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]["content"]) == 1
    assert refused(http, CHAT, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"


def test_bytes_of_unfinished_characters(http: httpx.Client) -> None:
    """OpenAI gives a token's own bytes, so that parts of a character can be put together."""
    messages = [{"role": "user", "content": "Repeat: 😏"}, {"role": "assistant", "content": "Emoji: 😀😃😄"}]
    choice = chat(http, messages=messages, temperature=0, max_tokens=9, logprobs=True)["choices"][0]
    data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert data.decode(errors="replace").rstrip("\ufffd").startswith(choice["message"]["content"].rstrip("\ufffd"))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stop_strings_are_cut(http: httpx.Client, path: str) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": COUNT}]
    base = {"messages": messages} if path == CHAT else {"prompt": COUNT}

    def text(**body: object) -> tuple[str, str]:
        answer = http.post(path, json={**base, "temperature": 0, "max_tokens": 12, **body}).json()
        (choice,) = answer["choices"]
        return choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"]

    free, reason = text()
    assert reason == "length"
    assert text(stop=None) == text(stop=[]) == (free, reason)
    stop = free[7:10]  # inside tokens
    cut = free[: free.index(stop)]
    for form in (stop, [stop], ["absent", stop], [stop] * 4):
        assert text(stop=form) == (cut, "stop")
    events = read_events(
        http.post(path, json={**base, "temperature": 0, "max_tokens": 12, "stop": stop, "stream": True}).content
    )
    choices = [event["choices"][0] for event in events[:-1]]
    pieces = [choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices]
    assert "".join(pieces) == cut
    assert choices[-1]["finish_reason"] == "stop"
    assert refused(http, path, stop=list("abcde"))["param"] == "stop"
    assert refused(http, path, stop="")["param"] == "stop"
    refused(http, path, stop=[1])


def test_logit_bias(http: httpx.Client) -> None:
    plain = complete(http, max_tokens=1, logprobs=1)["choices"][0]["text"]
    token_id = http.post("/tokenize", json={"inputs": plain}).json()[0]["id"]
    for bias in ({str(token_id): -100}, [0.0] * token_id + [-100.0]):
        assert complete(http, max_tokens=1, logit_bias=bias)["choices"][0]["text"] != plain
        assert complete(http, max_tokens=1, logit_bias=bias)["choices"][0]["text"] != plain
    forced = complete(http, max_tokens=3, logit_bias={"28": 100})["choices"][0]["text"]
    assert forced == ",,,"
    message = chat(http, temperature=0, max_tokens=3, logit_bias={"28": 100})["choices"][0]["message"]
    assert message["content"] == ",,,"
    assert complete(http, max_tokens=1, logit_bias={})["choices"][0]["text"] == plain
    assert complete(http, max_tokens=1, logit_bias=None)["choices"][0]["text"] == plain
    for bad in ({"x": 1}, {"28": 101}, {"-1": 1}, {"49152": 1}, {"9" * 5000: 1}, [0.0] * 49152 + [1.0]):
        assert refused(http, COMPLETIONS, logit_bias=bad)["param"] == "logit_bias"
    refused(http, COMPLETIONS, logit_bias={"1": "much"})


def test_both_names_of_the_limit(http: httpx.Client) -> None:
    for body in ({"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}):
        found = chat(http, **body)
        assert found["usage"]["completion_tokens"] == 2
        assert found["choices"][0]["finish_reason"] == "length"
    refused(http, CHAT, max_tokens=2, max_completion_tokens=3)
    refused(http, CHAT, max_tokens=0)
    refused(http, CHAT, max_completion_tokens=0)
    refused(http, CHAT, max_tokens=-1)
    assert refused(http, CHAT, max_tokens=5000)["code"] == "context_length_exceeded"


def test_greedy_and_sampling(http: httpx.Client) -> None:
    texts = {chat(http, temperature=0, max_tokens=8)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(texts) == 1
    texts = {chat(http, max_tokens=12, temperature=1.5)["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(texts) > 1
    assert chat(http, top_p=1.0, max_tokens=1)  # unlike TGI
    greedy = chat(http, temperature=0, max_tokens=8)["choices"][0]["message"]["content"]
    assert chat(http, top_k=1, max_tokens=8)["choices"][0]["message"]["content"] == greedy
    assert chat(http, top_p=0.0001, max_tokens=8)["choices"][0]["message"]["content"] == greedy
    assert chat(http, min_p=1.0, max_tokens=8)["choices"][0]["message"]["content"] == greedy
    assert chat(http, top_n_sigma=1e-4, max_tokens=8)["choices"][0]["message"]["content"] == greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.01),
        ("temperature", 1e39),
        ("top_p", 0),
        ("top_p", 1.1),
        ("typical_p", 0),
        ("min_p", 1.1),
        ("top_n_sigma", -0.1),
        ("top_k", -2),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("truncate", 0),
    ],
)
def test_ranges(http: httpx.Client, name: str, value: float) -> None:
    for path in (CHAT, COMPLETIONS):
        error = refused(http, path, 400, **{name: value})
        assert (error["type"], error["param"]) == ("invalid_request_error", name)
        assert name in error["message"]
        assert refused(http, path, 400, **{"temperature": 0, name: value}) == error  # where it would make no difference


def test_penalties_of_openai(http: httpx.Client) -> None:
    def last_comma(**penalties: float) -> float:
        choice = complete(http, max_tokens=4, logprobs=0, **penalties)["choices"][0]
        assert choice["text"] == " three, four,"
        return choice["logprobs"]["token_logprobs"][-1]

    for name in ("frequency_penalty", "presence_penalty"):
        assert last_comma(**{name: 1.0}) + 0.1 < last_comma() < last_comma(**{name: -1.0}) - 0.1
    # Once for each token against once for each time.
    plain = complete(http, max_tokens=16)["choices"][0]["text"]
    assert complete(http, max_tokens=16, presence_penalty=2.0)["choices"][0]["text"] == plain
    assert complete(http, max_tokens=16, frequency_penalty=2.0)["choices"][0]["text"] != plain


def test_model_is_told_back(http: httpx.Client) -> None:
    for given, told in ((None, "embedded"), ("tgi", "embedded"), ("", "embedded"), ("my/model", "my/model")):
        assert chat(http, model=given, max_tokens=1)["model"] == told
        assert complete(http, model=given, max_tokens=1)["model"] == told
    odd = '\x00content\x00 "quoted" {}\u2028'
    assert {chunk["model"] for chunk in stream(http, CHAT, model=odd, max_tokens=2)} == {odd}
