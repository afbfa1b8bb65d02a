"""The `/v1` routes on the real server: OpenAI's shapes and meanings, and TGI's own forms where they do not contradict."""

import json
import math
import re

import httpx2 as httpx
import pytest
from events import DONE, read_events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Say hello in one word."}]
COUNT = "Count: one, two,"  # greedy: " three, four, five, six, ..."


def chat(http: httpx.Client, **body: object) -> dict:
    answer = http.post(CHAT, json={"messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(http: httpx.Client, **body: object) -> dict:
    answer = http.post(COMPLETIONS, json={"prompt": COUNT, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(http: httpx.Client, path: str, **body: object) -> list[dict]:
    """The chunks, without the `[DONE]` behind them."""
    base = {"messages": HELLO} if path == CHAT else {"prompt": COUNT, "temperature": 0}
    answer = http.post(path, json={**base, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    events = read_events(answer.content)
    assert events[-1] == DONE
    return events[:-1]


def joined(chunks: list[dict], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def reasons(chunks: list[dict], index: int = 0) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def refused(http: httpx.Client, path: str, status: int = 400, **body: object) -> dict:
    base = {"messages": HELLO} if path == CHAT else {"prompt": COUNT}
    answers = [http.post(path, json={**base, **body, "stream": streams}) for streams in (False, True)]
    for answer in answers:
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert list(answer.json()) == ["error"]
        error = answer.json()["error"]
        assert list(error) == ["message", "type", "param", "code"]
    assert answers[0].json() == answers[1].json()
    assert http.get("/health").status_code == 200
    return answers[0].json()["error"]


# -- chat ----------------------------------------------------------------------------------------------------------


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


# -- messages and templates ----------------------------------------------------------------------------------------


def rendered(http: httpx.Client, **body: object) -> str:
    answer = http.post("/chat_tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["templated_text"]


def test_content_parts(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Say hello "}, {"type": "text", "text": "in one word.", "extra": 1}]
    assert rendered(http, messages=[{"role": "user", "content": parts}]) == rendered(http, messages=HELLO)
    whole = chat(http, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=4)
    assert whole["choices"][0] == chat(http, temperature=0, max_tokens=4)["choices"][0]
    refused(http, CHAT, messages=[{"role": "user", "content": [{"type": "video", "url": "x"}]}])
    refused(http, CHAT, messages=[{"role": "user", "content": 5}])
    refused(http, CHAT, messages=[{"content": "no role"}])
    refused(http, CHAT, messages="text")
    assert "messages" in refused(http, CHAT, messages=[])["message"]


def test_continuing_the_assistants_words(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": COUNT}]
    prompt = rendered(http, messages=messages)
    assert prompt.endswith(COUNT)
    found = chat(http, messages=messages, temperature=0, max_tokens=4)["choices"][0]["message"]["content"]
    assert found.startswith(" three")
    fresh = rendered(http, messages=messages, add_generation_prompt=True)
    assert fresh.endswith("<|im_start|>assistant\n")
    assert COUNT + "<|im_end|>" in fresh
    whole = rendered(http, messages=messages, continue_final_message=False, add_generation_prompt=False)
    assert whole.endswith("<|im_end|>\n")
    refused(http, CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
    refused(http, CHAT, messages=HELLO, continue_final_message=True, add_generation_prompt=True)
    assert not rendered(http, messages=HELLO, add_generation_prompt=False).endswith("assistant\n")


def test_continued_words_are_trimmed_at_the_right(http: httpx.Client) -> None:
    """As TGI: what ends the prompt is the last character that is no space."""
    for content in (COUNT + "  \n\t ", [{"type": "text", "text": COUNT + " "}, {"type": "text", "text": " \n"}]):
        messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": content}]
        assert rendered(http, messages=messages).endswith("<|im_start|>assistant\n" + COUNT)
        found = chat(http, messages=messages, temperature=0, max_tokens=4)["choices"][0]["message"]["content"]
        assert found.startswith(" three")
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": COUNT + " "}]
    # Whoever asks in transformers' way gets what transformers makes.
    assert rendered(http, messages=messages, continue_final_message=True).endswith(COUNT + " ")
    assert rendered(http, messages=messages, add_generation_prompt=True).endswith("assistant\n")


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_messages_without_content(http: httpx.Client, role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}):
        messages = [{"role": "user", "content": "Hi"}, message]
        error = refused(http, CHAT, messages=messages)
        assert (error["type"], error["param"]) == ("invalid_request_error", "messages[1].content")
        assert "`messages[1].content` is missing" in error["message"]
        native = http.post("/chat_tokenize", json={"messages": messages})
        assert (native.status_code, native.json()["error_type"]) == (422, "validation")
        assert native.json()["error"].startswith("Input validation error: `messages[1].content` is missing")
    assert chat(http, messages=[{"role": "user", "content": ""}], max_tokens=1)
    assert chat(http, messages=[{"role": "user", "content": []}], max_tokens=1)


def test_images_are_text(http: httpx.Client) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}, {"type": "text", "text": "What is it?"}]
    assert "![](http://x/y.png)What is it?<|im_end|>" in rendered(http, messages=[{"role": "user", "content": parts}])


def test_chat_template_kwargs(http: httpx.Client) -> None:
    """The embedded model's template reads none; those that have a field of their own are refused."""
    plain = rendered(http, messages=HELLO)
    assert rendered(http, messages=HELLO, chat_template_kwargs={"enable_thinking": False, "x": [1]}) == plain
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        error = refused(http, CHAT, chat_template_kwargs={name: True})
        assert "chat_template_kwargs" in error["message"]
        assert name in error["message"]
    refused(http, CHAT, chat_template_kwargs=[1])


def test_roles(http: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = rendered(http, messages=messages)
    assert prompt.index("Be brief.") < prompt.index("Hi") < prompt.index("Hello") < prompt.index("Bye")
    assert chat(http, messages=messages, max_tokens=2)["choices"]


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_not_served_is_refused_by_name(http: httpx.Client, path: str) -> None:
    values = {"guided_grammar": "root ::= a", "use_beam_search": True, "bad_words": ["a"], "allowed_token_ids": [1]}
    values |= {"audio": {}, "web_search_options": {}} if path == CHAT else {"suffix": "x"}
    for name, value in values.items():
        error = refused(http, path, 400, **{name: value})
        assert (error["param"], name in error["message"]) == (name, True)
    assert refused(http, path, structured_outputs={"grammar": "root ::= a"})["param"] == "structured_outputs"
    if path == CHAT:
        assert refused(http, path, modalities=["text", "audio"])["param"] == "modalities"
        assert chat(http, modalities=["text"], max_tokens=1)


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    assert chat(http, max_tokens=1, **harmless, prediction=None, verbosity="low", reasoning_effort="low")
    assert complete(http, max_tokens=1, **harmless)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_malformed_bodies(http: httpx.Client, path: str) -> None:
    cases = [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"{}", "application/json", 400),
        (b'{"prompt":"\xff","messages":[]}', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b'{"model":"' + b"x" * 2_000_000 + b'"}', "application/json", 413),
    ]
    for content, kind, status in cases:
        answer = http.post(path, content=content, headers={"content-type": kind})
        assert answer.status_code == status, content[:50]
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    name = "messages" if path == CHAT else "prompt"
    error = http.post(path, json={}).json()["error"]
    assert (f"`{name}`" in error["message"], error["param"]) == (True, name)
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        (CHAT, {"messages": [HELLO[0], {"content": "a"}]}, "messages[1].role", "missing_required_parameter"),
        (CHAT, {"messages": "Hello"}, "messages", "invalid_type"),
        (
            CHAT,
            {"messages": HELLO, "tools": [{"function": {}}]},
            "tools[0].function.name",
            "missing_required_parameter",
        ),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature", "invalid_type"),
        (CHAT, {"messages": HELLO, "max_tokens": -1}, "max_tokens", "invalid_value"),
        (COMPLETIONS, {"prompt": {}}, "prompt", "invalid_type"),
        (COMPLETIONS, {"prompt": "a", "n": "two"}, "n", "invalid_type"),
    ],
)
def test_errors_of_types_name_their_place(http: httpx.Client, path: str, body: dict, param: str, code: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_context_overflow(http: httpx.Client, path: str) -> None:
    """OpenAI's words and code: clients look for them to shorten a conversation."""
    name = "messages" if path == CHAT else "prompt"
    text = "word " * 990

    def overflow(text: str, **more: object) -> str:
        value = [{"role": "user", "content": text}] if path == CHAT else text
        error = refused(http, path, 400, **{name: value, **more})
        assert error["type"] == "invalid_request_error"
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")
        return error["message"]

    found = re.fullmatch(
        r"This model's maximum context length is 1024 tokens. However, you requested (\d+) tokens "
        rf"\((\d+) in the {name}, 500 in the completion\). "
        rf"Please reduce the length of the {name} or completion.",
        overflow(text, max_tokens=500),
    )
    assert found is not None
    assert int(found[1]) == int(found[2]) + 500
    assert 990 <= int(found[2]) <= 1024
    found = re.fullmatch(
        rf"This model's maximum context length is \d+ tokens. However, your {name} resulted in (\d+) tokens. "
        rf"Please reduce the length of the {name}.",
        overflow("word " * 3000),
    )
    assert found is not None
    assert int(found[1]) >= 3000


def test_own_names_in_errors(http: httpx.Client) -> None:
    """`inputs` and `max_new_tokens` are names of the native routes."""
    for path in (CHAT, COMPLETIONS):
        for body in ({"max_tokens": 0}, {"truncate": 10_000}, {"truncate_prompt_tokens": 10_000}, {"min_tokens": 5000}):
            message = refused(http, path, **{"max_tokens": 8, **body})["message"]
            assert "inputs" not in message
            assert "max_new_tokens" not in message
    assert refused(http, COMPLETIONS, prompt=[49152])["param"] == "prompt"
    assert refused(http, COMPLETIONS, prompt="")["param"] == "prompt"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/files", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/models/embedded", 405),
        ("GET", "/v1/", 404),
    ],
)
def test_other_routes_answer_as_openai(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["type"] == "invalid_request_error"
    assert path in error["message"]


# -- completions ---------------------------------------------------------------------------------------------------


def test_completion(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": COUNT, "temperature": 0, "max_tokens": 4})
    found = answer.json()
    assert list(found) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert found["object"] == "text_completion"
    assert re.fullmatch(r"cmpl-\w{10,}", found["id"])
    (choice,) = found["choices"]
    assert choice == {"index": 0, "text": " three, four,", "logprobs": None, "finish_reason": "length"}
    assert found["usage"]["completion_tokens"] == 4
    assert answer.headers["x-generated-tokens"] == "4"
    assert "x-compute-time" not in answer.headers
    assert answer.headers["x-compute-characters"] == str(len(COUNT))


def test_completion_stream(http: httpx.Client) -> None:
    chunks = stream(http, COMPLETIONS, max_tokens=4)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" three", ",", " four", ","]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    for chunk in chunks:
        assert list(chunk) == ["object", "id", "created", "model", "system_fingerprint", "choices"]
        assert chunk["object"] == "text_completion"


def test_several_prompts(http: httpx.Client) -> None:
    prompts = [COUNT, "The capital of France is", "1 2 3 4", "a", "b", COUNT]  # more than a native client may send
    alone = [complete(http, prompt=prompt, max_tokens=5) for prompt in prompts]
    answer = http.post(COMPLETIONS, json={"prompt": prompts, "temperature": 0, "max_tokens": 5})
    found = answer.json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in found["choices"]] == [one["choices"][0]["text"] for one in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(one["usage"][name] for one in alone)
    assert answer.headers["x-compute-characters"] == str(sum(map(len, prompts)))
    assert answer.headers["x-generated-tokens"] == "30"
    chunks = stream(http, COMPLETIONS, prompt=prompts, max_tokens=5, stream_options={"include_usage": True})
    for index, one in enumerate(alone):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == one["choices"][0]["text"]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"]["total_tokens"] == found["usage"]["total_tokens"]


def test_token_ids_as_prompt(http: httpx.Client) -> None:
    ids = [token["id"] for token in http.post("/tokenize", json={"inputs": COUNT}).json()]
    text = complete(http, max_tokens=5)["choices"][0]["text"]
    assert complete(http, prompt=ids, max_tokens=5)["choices"][0]["text"] == text
    both = complete(http, prompt=[ids, ids], max_tokens=5)["choices"]
    assert [choice["text"] for choice in both] == [text, text]
    for bad in ([49152], [-1], [2**70], ["a", 1], ["a", [1]], [[]], [[1], 2], [1.5], [None]):
        refused(http, COMPLETIONS, prompt=bad)


def test_prompts_that_are_refused(http: httpx.Client) -> None:
    message = refused(http, COMPLETIONS, prompt=[])["message"]
    assert "Empty array detected. Do not use an empty array for the prompt." in message
    error = refused(http, COMPLETIONS, prompt=["a"] * 129)
    assert error["param"] == "prompt"
    assert error["message"].endswith("`prompt` holds 129 prompts: at most 128 may run at a time on this server")
    assert refused(http, COMPLETIONS, prompt=["a"] * 50, n=3)["param"] == "prompt"
    refused(http, COMPLETIONS, prompt="")
    refused(http, COMPLETIONS, prompt=["a", ""])
    refused(http, COMPLETIONS, prompt=None)
    refused(http, COMPLETIONS, prompt=5)
    refused(http, COMPLETIONS, prompt="word " * 3000)


def test_echo_and_logprobs_of_completions(http: httpx.Client) -> None:
    found = complete(http, max_tokens=3, logprobs=2, echo=True)["choices"][0]
    text = found["text"]
    assert text.startswith(COUNT)
    logprobs = found["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"])
    assert all(len(tops) == 2 for tops in logprobs["top_logprobs"][-3:])
    plain = complete(http, max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert plain["tokens"] == [" three", ",", " four"]
    assert plain["top_logprobs"] is None
    assert plain["text_offset"] == [len(COUNT), len(COUNT) + 6, len(COUNT) + 7]
    chunks = stream(http, COMPLETIONS, max_tokens=3, logprobs=1, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == text
    assert complete(http, max_tokens=1, echo=True)["choices"][0]["text"] == COUNT + " three"
    assert refused(http, COMPLETIONS, logprobs=6)["param"] == "logprobs"


def test_best_tokens_in_the_places_of_the_prompt(http: httpx.Client) -> None:
    """A prompt's token is the greedy choice in its place if it is as likely as the best one there."""
    text = COUNT + " three, four, five"
    logprobs = complete(http, prompt=text, max_tokens=0, echo=True, logprobs=3)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(tops) == 3 for tops in logprobs["top_logprobs"][1:])
    parallel = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    for token, value, tops in list(parallel)[1:]:
        assert list(tops.values()) == sorted(tops.values(), reverse=True)
        assert value <= max(tops.values())
        assert token not in tops or tops[token] == value
    greedy = [next(iter(tops)) for tops in logprobs["top_logprobs"][-5:]]
    assert greedy == logprobs["tokens"][-5:] == [" three", ",", " four", ",", " five"]
    last = zip(logprobs["token_logprobs"][-5:], logprobs["top_logprobs"][-5:], strict=True)
    assert all(value == max(tops.values()) for value, tops in last)


def test_tokens_cut_inside_a_character(http: httpx.Client) -> None:
    """They are told byte by byte, as OpenAI does: two of them never look alike, and nothing is lost."""
    text = "Emoji: 😀 and 鑫 end"
    found = complete(http, prompt=text, max_tokens=0, echo=True, logprobs=2)["choices"][0]["logprobs"]
    cut = [token for token in found["tokens"] if token.startswith("bytes:")]
    assert len(cut) >= 2
    assert "\ufffd" not in "".join(found["tokens"])
    data = b"".join(
        re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), token[6:].encode())
        if token.startswith("bytes:")
        else token.encode()
        for token in found["tokens"]
    )
    assert data.decode() == text
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    messages = [{"role": "user", "content": "Repeat: 😏"}, {"role": "assistant", "content": "Emoji: 😀😃😄"}]
    choice = chat(http, messages=messages, temperature=0, max_tokens=9, logprobs=True)["choices"][0]
    cut = [entry for entry in choice["logprobs"]["content"] if "\\x" in entry["token"]]
    assert cut
    for entry in cut:
        assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]


def test_scoring_a_prompt(http: httpx.Client) -> None:
    """`echo` with no token to generate: what evaluation programs ask for."""
    longer = complete(http, max_tokens=1, echo=True, logprobs=2)["choices"][0]
    found = complete(http, max_tokens=0, echo=True, logprobs=2)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (COUNT, "length")
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] == len(choice["logprobs"]["tokens"])
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert choice["logprobs"][name] == longer["logprobs"][name][:-1]
    several = complete(http, prompt=[COUNT, "Hello there"], max_tokens=0, echo=True, logprobs=0)["choices"]
    assert [one["text"] for one in several] == [COUNT, "Hello there"]
    assert several[0]["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"]
    options = {"include_usage": True}
    chunks = stream(http, COMPLETIONS, max_tokens=0, echo=True, logprobs=0, stream_options=options)
    assert [one["text"] for chunk in chunks for one in chunk["choices"]] == [COUNT]
    assert chunks[0]["choices"][0]["finish_reason"] == "length"
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert complete(http, max_tokens=0, echo=True)["choices"][0]["text"] == COUNT
    assert refused(http, COMPLETIONS, max_tokens=0)["param"] == "max_tokens"
    assert refused(http, COMPLETIONS, max_tokens=0, logprobs=1)["param"] == "max_tokens"
    assert refused(http, CHAT, max_tokens=0)["param"] == "max_tokens"


def test_candidates_of_completions(http: httpx.Client) -> None:
    found = complete(http, n=2, best_of=3, temperature=1.0, max_tokens=6, logprobs=0)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in found["choices"]]
    assert means == sorted(means, reverse=True)
    assert refused(http, COMPLETIONS, n=3, best_of=2)["param"] == "best_of"
    assert refused(http, COMPLETIONS, best_of=21)["param"] == "best_of"
    several = complete(http, prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    chunks = stream(http, COMPLETIONS, prompt=["a", "b"], n=2, max_tokens=2)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1, 2, 3}
    answer = http.post(COMPLETIONS, json={"prompt": "a", "best_of": 2, "stream": True})
    assert answer.status_code == 400


def test_seeded_completion_stream(http: httpx.Client) -> None:
    body = {"temperature": 1.0, "seed": 9, "max_tokens": 16}
    chunks = stream(http, COMPLETIONS, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == complete(http, **body)["choices"][0]["text"]


# -- response_format -----------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a person."}]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        {"type": "json_schema", "value": {"name": "person", "schema": PERSON}},
        {"type": "json", "value": PERSON},
        {"type": "json_object", "value": PERSON},
        {"type": "json", "value": json.dumps(PERSON)},
    ],
    ids=["openai", "tgi-json_schema", "tgi-json", "tgi-json_object", "tgi-text"],
)
def test_schemas(http: httpx.Client, form: dict) -> None:
    body = {"messages": ASK, "response_format": form, "max_tokens": 80, "temperature": 0}
    whole = chat(http, **body)["choices"][0]
    value = json.loads(whole["message"]["content"])
    assert list(value) == ["name", "age"]
    assert isinstance(value["age"], int)
    assert whole["finish_reason"] == "stop"
    assert joined(stream(http, CHAT, **body)) == whole["message"]["content"]


def test_other_formats(http: httpx.Client) -> None:
    text = chat(http, messages=ASK, response_format={"type": "text"}, temperature=0, max_tokens=6)
    assert text["choices"][0] == chat(http, messages=ASK, temperature=0, max_tokens=6)["choices"][0]
    regex = {"type": "regex", "value": "(yes|no)!"}
    answer = chat(http, messages=ASK, response_format=regex, max_tokens=10)["choices"][0]
    assert answer["message"]["content"] in ("yes!", "no!")
    anything = chat(http, messages=ASK, response_format={"type": "json_object"}, temperature=0, max_tokens=60)
    choice = anything["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")
    unnamed = {"type": "json_schema", "json_schema": {"name": "any"}}
    first = chat(http, messages=ASK, response_format=unnamed, max_tokens=1)["choices"][0]["message"]["content"]
    assert first.lstrip().startswith("{")


@pytest.mark.parametrize(
    "form",
    [
        {"type": "yaml"},
        {},
        "json",
        {"type": "json"},
        {"type": "regex"},
        {"type": "regex", "value": 5},
        {"type": "regex", "value": "(["},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"schema": 5}},
        {"type": "json", "value": "{"},
        {"type": "json", "value": 5},
    ],
    ids=str,
)
def test_formats_that_are_refused(http: httpx.Client, form: object) -> None:
    error = refused(http, CHAT, response_format=form)
    assert error["type"] == "invalid_request_error"
    assert re.search("grammar|response_format", error["message"])


PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def told(message: dict) -> str:
    """Whether a message is a call or a person, and that it is nothing else."""
    if "tool_calls" in message:
        assert not message["content"]
        for call in check_calls(message, {"get_weather", "add"}):
            arguments = json.loads(call["function"]["arguments"])
            assert list(arguments) == (["city", "days"] if call["function"]["name"] == "get_weather" else ["a", "b"])
        return "call"
    person = json.loads(message["content"])
    assert list(person) == ["name", "age"] and isinstance(person["age"], int)
    return "person"


def test_a_call_or_an_answer_in_the_format(http: httpx.Client) -> None:
    """The model chooses; the seeds are such that it takes either way."""
    body = {"tools": TOOLS, "response_format": PERSON_FORMAT, "max_tokens": 80, "n": 4, "seed": 3}
    kinds: set[str] = set()
    for choice, messages in ((None, ASK), ("auto", WEATHER)):
        found = chat(http, **body, messages=messages, tool_choice=choice)["choices"]
        for whole in found:
            if whole["finish_reason"] == "length":
                continue
            kinds.add(told(whole["message"]))
            assert whole["finish_reason"] == ("tool_calls" if "tool_calls" in whole["message"] else "stop")
        chunks = stream(http, CHAT, **body, messages=messages, tool_choice=choice)
        for whole in found:
            index = whole["index"]
            assert joined(chunks, index) == (whole["message"]["content"] or "")
            assert streamed_calls(chunks, index) == [
                call["function"] for call in whole["message"].get("tool_calls", [])
            ]
            assert reasons(chunks, index) == [whole["finish_reason"]]
    assert kinds == {"call", "person"}


@pytest.mark.parametrize(
    ("choice", "kind"),
    [("none", "person"), ("required", "call"), ("add", "call"), ({"function": {"name": "get_weather"}}, "call")],
    ids=str,
)
def test_a_choice_of_tools_beside_a_format(http: httpx.Client, choice: object, kind: str) -> None:
    body = {"tools": TOOLS, "tool_choice": choice, "response_format": PERSON_FORMAT, "temperature": 0}
    message = chat(http, **body, messages=WEATHER, max_tokens=150)["choices"][0]["message"]
    assert told(message) == kind


def test_formats_beside_tools(http: httpx.Client) -> None:
    """One call only where several are refused; formats that demand nothing; other forms; no tools at all."""
    many = chat(http, tools=TOOLS, response_format=PERSON_FORMAT, parallel_tool_calls=False, n=4, seed=3, max_tokens=80)
    assert all(len(choice["message"].get("tool_calls", [])) <= 1 for choice in many["choices"])
    assert chat(http, tools=TOOLS, response_format={"type": "text"}, max_tokens=1)
    regex = {"type": "regex", "value": "(yes|no)!"}
    for choice in chat(http, tools=TOOLS, response_format=regex, n=4, seed=1, max_tokens=99)["choices"]:
        assert "tool_calls" in choice["message"] or choice["message"]["content"] in ("yes!", "no!")
    empty = chat(http, messages=ASK, tools=[], response_format=PERSON_FORMAT, temperature=0, max_tokens=80)
    assert told(empty["choices"][0]["message"]) == "person"
    error = refused(http, CHAT, tools=TOOLS, response_format={"type": "json", "value": {"type": "nothing"}})
    assert "grammar is not valid" in error["message"]


# -- tools ---------------------------------------------------------------------------------------------------------


def tool(name: str, **properties: dict) -> dict:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": schema}}


TOOLS = [
    tool("get_weather", city={"type": "string", "maxLength": 16}, days={"type": "integer", "maximum": 9}),
    tool("add", a={"type": "integer", "maximum": 99}, b={"type": "integer", "maximum": 99}),
]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


def streamed_calls(chunks: list[dict], index: int = 0) -> list[dict]:
    """The calls of a stream as whole answers have them."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    calls: list[dict] = []
    for delta in (delta for choice in choices for delta in choice["delta"].get("tool_calls", [])):
        if delta["index"] == len(calls):
            calls.append({"name": delta["function"]["name"], "arguments": ""})
        calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return calls


def check_calls(message: dict, names: set[str]) -> list[dict]:
    calls = message["tool_calls"]
    assert calls
    for call in calls:
        assert list(call) == ["id", "type", "function"]
        assert call["type"] == "function"
        assert list(call["function"]) == ["name", "arguments"]
        assert call["function"]["name"] in names
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert len({call["id"] for call in calls}) == len(calls)
    return calls


@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ("required", None, {"get_weather", "add"}),
        ("required", False, {"get_weather", "add"}),
        ({"type": "function", "function": {"name": "add"}}, None, {"add"}),
        ("get_weather", None, {"get_weather"}),  # TGI's form
        ({"function": {"name": "get_weather"}}, False, {"get_weather"}),
    ],
    ids=str,
)
def test_forced_calls(http: httpx.Client, choice: object, names: set[str], parallel: bool | None) -> None:
    body = {
        "messages": WEATHER,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 150,
        "temperature": 0,
    }
    whole = chat(http, **body)["choices"][0]
    calls = check_calls(whole["message"], names)
    if parallel is False:
        assert len(calls) == 1
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else whole["finish_reason"])
    assert whole["finish_reason"] in ("tool_calls", "stop")
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        assert list(arguments) == (["city", "days"] if call["function"]["name"] == "get_weather" else ["a", "b"])
    assert not whole["message"]["content"]

    chunks = stream(http, CHAT, **body)
    deltas = [delta for chunk in chunks for delta in chunk["choices"][0]["delta"].get("tool_calls", [])]
    for number, call in enumerate(calls):
        mine = [delta for delta in deltas if delta["index"] == number]
        assert mine[0]["type"] == "function"
        assert mine[0]["id"]
        assert mine[0]["function"]["name"] == call["function"]["name"]
        assert all("id" not in delta and "name" not in delta["function"] for delta in mine[1:])
        arguments = "".join(delta["function"]["arguments"] for delta in mine)
        assert arguments == call["function"]["arguments"]
    assert {delta["index"] for delta in deltas} == set(range(len(calls)))
    assert reasons(chunks) == [whole["finish_reason"]]
    assert joined(chunks) == ""


def test_call_that_is_cut_off(http: httpx.Client) -> None:
    """As far as it came, and never as text: `{"name": "get_weather", "parameters": {"city": "Paris", ...`."""
    body = {"messages": WEATHER, "tools": TOOLS, "tool_choice": "get_weather", "temperature": 0}
    complete = chat(http, **body, max_tokens=150)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    lengths: list[int] = []
    for size in (1, 3, 6, 9, 12, 15):
        whole = chat(http, **body, max_tokens=size)["choices"][0]
        assert whole["finish_reason"] == "length"
        assert not whole["message"]["content"]
        (call,) = whole["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert complete.startswith(call["function"]["arguments"])
        lengths.append(len(call["function"]["arguments"]))
        chunks = stream(http, CHAT, **body, max_tokens=size)
        assert reasons(chunks) == ["length"]
        assert joined(chunks) == ""
        assert streamed_calls(chunks) == [call["function"]]
    assert lengths[0] == 0 < lengths[-1] < len(complete)
    # Which of several it would have been is not known yet.
    unknown = chat(http, **{**body, "tool_choice": "required"}, max_tokens=2)["choices"][0]
    assert (unknown["message"]["content"], unknown["finish_reason"]) == ("", "length")


def test_tools_that_may_be_left_alone(http: httpx.Client) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    plain = chat(http, **body)["choices"][0]
    none = chat(http, **body, tools=TOOLS, tool_choice="none")["choices"][0]
    assert none == plain  # the model never hears of them
    for choice in ("auto", None):
        auto = chat(http, **body, tools=TOOLS, tool_choice=choice)["choices"][0]
        chunks = stream(http, CHAT, **body, tools=TOOLS, tool_choice=choice)
        assert joined(chunks) == (auto["message"]["content"] or "")
        assert reasons(chunks) == [auto["finish_reason"]]
    assert chat(http, **body, tools=[])["choices"][0] == plain
    assert chat(http, **body, tools=None, tool_choice="auto")["choices"][0] == plain


def test_tools_reach_the_prompt(http: httpx.Client) -> None:
    prompt = rendered(http, messages=WEATHER, tools=TOOLS)
    assert "get_weather" in prompt
    assert "add it" in prompt
    assert "get_weather" not in rendered(http, messages=WEATHER, tools=TOOLS, tool_choice="none")
    named = rendered(http, messages=WEATHER, tools=TOOLS, tool_choice="add")
    assert "add it" in named
    assert "be very careful" in rendered(http, messages=WEATHER, tools=TOOLS, tool_prompt="be very careful")


def test_tool_messages_are_fed_back(http: httpx.Client) -> None:
    for arguments in ('{"city": "Paris", "days": 1}', {"city": "Paris", "days": 1}):
        call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        messages = [
            *WEATHER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sunny, 21 degrees"},
        ]
        prompt = rendered(http, messages=messages, tools=TOOLS)
        assert "sunny, 21 degrees" in prompt
        assert "Paris" in prompt[prompt.index("weather in Paris?") + 20 :]
        found = chat(http, messages=messages, tools=TOOLS, max_tokens=8)
        assert found["choices"][0]["finish_reason"] in ("length", "stop", "tool_calls")
    without_content = [*WEATHER, {"role": "assistant", "tool_calls": [call]}]
    assert chat(http, messages=without_content, tools=TOOLS, max_tokens=2)


def test_tool_choices_that_are_refused(http: httpx.Client) -> None:
    error = refused(http, CHAT, tools=TOOLS, tool_choice="no_such_tool")
    assert error["message"] == "Tool error: Tool with name no_such_tool not found"
    named = {"type": "function", "function": {"name": "absent"}}
    assert "absent" in refused(http, CHAT, tools=TOOLS, tool_choice=named)["message"]
    refused(http, CHAT, tool_choice="required")
    refused(http, CHAT, tools=[], tool_choice="required")
    refused(http, CHAT, tools=[{"type": "function"}])
    refused(http, CHAT, tools=[{"type": "function", "function": {}}])
    refused(http, CHAT, tools="get_weather")


def test_tools_with_odd_schemas(http: httpx.Client) -> None:
    """No parameters at all, TGI's other name for them, and a schema that cannot be enforced."""
    bare = {"type": "function", "function": {"name": "now"}}
    other = {"type": "function", "function": {"name": "now", "arguments": {"type": "object", "properties": {}}}}
    for one in (bare, other):
        found = chat(http, messages=WEATHER, tools=[one], tool_choice="required", max_tokens=100, temperature=0)
        assert check_calls(found["choices"][0]["message"], {"now"})
    broken = {"type": "function", "function": {"name": "now", "parameters": {"type": "nothing"}}}
    error = refused(http, CHAT, messages=WEATHER, tools=[broken], tool_choice="required")
    assert "`parameters` of the tool 'now'" in error["message"]


def test_numbers_are_finite(http: httpx.Client) -> None:
    """A bias that makes a token impossible still gives OpenAI's clients a number."""
    found = complete(http, max_tokens=2, logprobs=5, logit_bias={"28": -100})
    values = [value for tops in found["choices"][0]["logprobs"]["top_logprobs"] for value in tops.values()]
    assert all(math.isfinite(value) for value in values)


def test_a_stop_string_in_the_last_permitted_token(http: httpx.Client) -> None:
    body = {"prompt": "Count: one, two,", "temperature": 0, "max_tokens": 1, "stop": " three"}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_cached_tokens_are_told_however_it_ends(http: httpx.Client) -> None:
    prompt = "The numbers in their order: " + ", ".join(str(number) for number in range(60)) + ","
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4}
    http.post("/v1/completions", json=body)
    by_length = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    stopped = http.post("/v1/completions", json={**body, "stop": ","}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["prompt_tokens_details"]["cached_tokens"] == by_length > 0
