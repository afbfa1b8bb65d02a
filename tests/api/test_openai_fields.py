"""Fields of `/v1` bodies that other servers have: honoured where that is possible, ignored where nobody knows them."""

import json
import re

import httpx2 as httpx
import pytest
from events import DONE, read_events
from serving import Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Say hello in one word."}]
COUNT = "Count: one, two,"  # greedy: " three, four, five, six, ..."
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {"enum": [1]}}}},
    }
    for name in ("add", "sub")
]


def post(http: httpx.Client, path: str, **body: object) -> dict:
    base = {"messages": HELLO} if path == CHAT else {"prompt": COUNT}
    answer = http.post(path, json={**base, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(found: dict, index: int = 0) -> str:
    choice = found["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def refused(http: httpx.Client, path: str, **body: object) -> dict:
    base = {"messages": HELLO} if path == CHAT else {"prompt": COUNT}
    answer = http.post(path, json={**base, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def end_token(http: httpx.Client) -> int:
    (token,) = http.post("/tokenize", json={"inputs": "<|im_end|>"}).json()
    return token["id"]


# -- unknown -------------------------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored_counted_and_logged_once(server: Server, http: httpx.Client) -> None:
    unknown = {
        "max_retries": 2,
        "options": {"use_cache": False},
        "use_cache": True,
        "keep_alive": "5m",
        "tomorrow": [1],
    }
    before = server.metrics().get("tgi_unknown_fields", 0)
    for path in (CHAT, COMPLETIONS):
        plain = text_of(post(http, path, max_tokens=3))
        assert text_of(post(http, path, max_tokens=3, **unknown)) == plain
    native = {"inputs": COUNT, "parameters": {"max_new_tokens": 1, "from_elsewhere": 1}, "tomorrow": 1}
    assert http.post("/generate", json=native).status_code == 200
    assert http.post("/invocations", json=native).status_code == 200
    assert http.post("/chat_tokenize", json={"messages": HELLO, "tomorrow": 1}).status_code == 200
    assert server.metrics()["tgi_unknown_fields"] == before + 2 * len(unknown) + 2 * 2 + 1
    for name in (*unknown, "parameters.from_elsewhere"):
        lines = [line for line in server.lines if f"The field '{name}' of a request is not known" in line]
        assert len(lines) == 1, name
        assert " INFO " in lines[0]


def test_names_of_unknown_fields_cannot_harm_the_log(server: Server, http: httpx.Client) -> None:
    post(http, COMPLETIONS, max_tokens=1, **{"line\nfeed": 1, "z" * 10_000: 1, "": 1})
    assert http.post(COMPLETIONS, content=b'{"prompt":"a","max_tokens":1,"\\ud800":1}').status_code in (200, 400, 415)
    assert not any(line.startswith("feed") for line in server.lines)
    assert "z" * 65 not in server.log


def test_fields_that_are_known_are_not_logged(server: Server, http: httpx.Client) -> None:
    post(http, CHAT, max_tokens=1, user="u", store=False, metadata={"a": "b"}, prompt_cache_key="k", min_tokens=0)
    assert http.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 1, "seed": None}}).is_success
    for name in ("user", "metadata", "min_tokens", "parameters", "parameters.seed"):
        assert f"The field '{name}'" not in server.log


# -- when it ends --------------------------------------------------------------------------------------------------


def test_min_tokens(http: httpx.Client) -> None:
    """Neither the model's own end nor stop tokens may come before; then they may."""
    for more in ({}, {"temperature": 0.7, "seed": 3}):
        short = post(http, CHAT, max_tokens=60, **more)["usage"]["completion_tokens"]
        assert short < 40
        found = post(http, CHAT, max_tokens=60, min_tokens=40, logprobs=True, **more)
        assert 40 < found["usage"]["completion_tokens"] <= 60
        tokens = [entry["token"] for entry in found["choices"][0]["logprobs"]["content"]]
        assert "<|im_end|>" not in tokens[:40]
    with_stop = {"stop_token_ids": [comma(http)], "max_tokens": 12}
    assert text_of(post(http, COMPLETIONS, **with_stop)) == " three"
    found = post(http, COMPLETIONS, **with_stop, min_tokens=5)
    assert "," not in text_of(found)
    assert found["usage"]["completion_tokens"] >= 5
    error = refused(http, COMPLETIONS, min_tokens=5, max_tokens=4)
    assert (error["param"], "`max_tokens`" in error["message"]) == ("min_tokens", True)


def test_stop_strings_wait_for_min_tokens(http: httpx.Client) -> None:
    whole = text_of(post(http, COMPLETIONS, max_tokens=12))
    assert whole.startswith(" three, four, five, six,")
    assert text_of(post(http, COMPLETIONS, max_tokens=12, stop=[","])) == " three"
    # Four tokens are " three, four,"; the next comma is behind " five".
    assert text_of(post(http, COMPLETIONS, max_tokens=12, stop=[","], min_tokens=4)) == " three, four, five"
    streamed = {"prompt": COUNT, "temperature": 0, "max_tokens": 12, "stop": [","], "min_tokens": 4, "stream": True}
    events = read_events(http.post(COMPLETIONS, json=streamed).content)
    assert events[-1] == DONE
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == " three, four, five"


def test_min_tokens_and_a_grammar(http: httpx.Client) -> None:
    """A text that is complete ends all the same; one that may go on does."""
    found = post(http, COMPLETIONS, guided_regex="abc", min_tokens=10, max_tokens=20)
    assert text_of(found) == "abc"
    short = post(http, COMPLETIONS, guided_regex="( [a-z]+,)+", stop_token_ids=[comma(http)], max_tokens=20)
    assert short["usage"]["completion_tokens"] < 10
    longer = post(http, COMPLETIONS, guided_regex="( [a-z]+)+", min_tokens=10, max_tokens=20)
    assert longer["usage"]["completion_tokens"] >= 10


def comma(http: httpx.Client) -> int:
    (token,) = http.post("/tokenize", json={"inputs": ","}).json()
    return token["id"]


def test_stop_tokens_and_what_ended_the_text(http: httpx.Client) -> None:
    stop = {"stop_token_ids": [comma(http)], "max_tokens": 12}
    found = post(http, COMPLETIONS, **stop)["choices"][0]
    assert (found["text"], found["finish_reason"]) == (" three", "stop")
    assert text_of(post(http, COMPLETIONS, **stop, include_stop_str_in_output=True)) == " three,"
    shown = {"stop": [" four"], "include_stop_str_in_output": True, "max_tokens": 12}
    assert text_of(post(http, COMPLETIONS, **shown)) == " three, four"
    assert refused(http, COMPLETIONS, stop_token_ids=[49152])["param"] == "stop_token_ids"
    assert refused(http, COMPLETIONS, stop_token_ids=[1] * 129)["param"] == "stop_token_ids"


def test_special_tokens_in_the_text(http: httpx.Client) -> None:
    going_on = {"ignore_eos": True, "max_tokens": 40}
    assert "<|im_end|>" not in text_of(post(http, CHAT, **going_on))
    assert "<|im_end|>" in text_of(post(http, CHAT, **going_on, skip_special_tokens=False))
    # The token that ends the text is not part of it, unless that is asked for too.
    ended = {"max_tokens": 60, "skip_special_tokens": False}
    assert text_of(post(http, CHAT, **ended)) == text_of(post(http, CHAT, max_tokens=60))
    assert text_of(post(http, CHAT, **ended, include_stop_str_in_output=True)).endswith("<|im_end|>")


def test_names_of_the_limit(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        assert post(http, path, max_new_tokens=2)["usage"]["completion_tokens"] == 2
        assert refused(http, path, max_new_tokens=2, max_tokens=3)["param"] == "max_tokens"
        assert refused(http, path, max_new_tokens=0)["param"] == "max_tokens"


# -- what goes in --------------------------------------------------------------------------------------------------


def test_truncating_the_prompt(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        usual = post(http, path, max_tokens=1, truncate=3)["usage"]["prompt_tokens"]
        assert usual == post(http, path, max_tokens=1, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3
        assert post(http, path, max_tokens=1, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] > 3
        for bad in (0, 5000):
            assert refused(http, path, truncate_prompt_tokens=bad)["param"] == "truncate_prompt_tokens"


def test_full_text(http: httpx.Client) -> None:
    assert text_of(post(http, COMPLETIONS, max_tokens=1, return_full_text=True)) == COUNT + " three"
    assert text_of(post(http, COMPLETIONS, max_tokens=1, return_full_text=False)) == " three"
    plain = text_of(post(http, CHAT, max_tokens=2))
    assert text_of(post(http, CHAT, max_tokens=2, return_full_text=True)) == plain


# -- how tokens are chosen -----------------------------------------------------------------------------------------


def test_do_sample(http: httpx.Client) -> None:
    greedy = text_of(post(http, CHAT, max_tokens=20))
    assert text_of(post(http, CHAT, max_tokens=20, temperature=None, do_sample=False)) == greedy
    hot = {"temperature": None, "do_sample": True, "max_tokens": 20}
    assert len({text_of(post(http, CHAT, **hot, seed=seed)) for seed in range(3)}) > 1


def test_best_of_chat(http: httpx.Client) -> None:
    found = post(http, CHAT, n=2, best_of=4, temperature=1.0, max_tokens=6, logprobs=True)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    values = [[entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in found["choices"]]
    means = [sum(one) / len(one) for one in values]
    assert means == sorted(means, reverse=True)
    assert found["usage"]["completion_tokens"] > sum(map(len, values))  # all four were computed
    assert refused(http, CHAT, best_of=1, n=2)["param"] == "best_of"
    assert refused(http, CHAT, best_of=2, stream=True)["param"] == "best_of"


# -- what the text must match --------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_guided(http: httpx.Client, path: str) -> None:
    for form in (
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ):
        assert list(json.loads(text_of(post(http, path, max_tokens=30, **form)))) == ["a"], form
    for form in ({"guided_regex": "[0-9]{3}x"}, {"structured_outputs": {"regex": "[0-9]{3}x"}}):
        assert re.fullmatch("[0-9]{3}x", text_of(post(http, path, max_tokens=30, **form)))
    odd = ["yes (1+1)?", "né|in", "a.b*[c]\\"]
    for form in ({"guided_choice": odd}, {"structured_outputs": {"choice": odd}}):
        assert text_of(post(http, path, max_tokens=30, **form)) in odd
    assert text_of(post(http, path, max_tokens=30, guided_choice=["a|b", "a|b"])) == "a|b"
    both = refused(http, path, guided_regex="a", guided_choice=["b"])
    assert "exclude each other" in both["message"]
    for bad in (
        {"guided_choice": []},
        {"guided_choice": ["a", ""]},
        {"guided_json": "{"},
        {"guided_regex": "("},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    ):
        refused(http, path, **bad)


# -- tools in other forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_allowed_tools(http: httpx.Client, flat: bool) -> None:
    def choice(mode: str, *names: str) -> dict:
        tools = [
            {"type": "function", "name": n} if flat else {"type": "function", "function": {"name": n}} for n in names
        ]
        inner = {"mode": mode, "tools": tools}
        return {"type": "allowed_tools", **(inner if flat else {"allowed_tools": inner})}

    for name in ("add", "sub"):
        found = post(http, CHAT, tools=TOOLS, tool_choice=choice("required", name), max_tokens=60)["choices"][0]
        assert {call["function"]["name"] for call in found["message"]["tool_calls"]} == {name}
    prompt = http.post("/chat_tokenize", json={"messages": HELLO, "tools": TOOLS, "tool_choice": choice("auto", "sub")})
    assert '"sub"' in prompt.json()["templated_text"]
    assert '"add"' not in prompt.json()["templated_text"]
    assert "'mul'" in refused(http, CHAT, tools=TOOLS, tool_choice=choice("auto", "mul"))["message"]


def test_refusals_in_the_conversation(http: httpx.Client) -> None:
    def prompt(*messages: dict) -> str:
        answer = http.post("/chat_tokenize", json={"messages": [*HELLO, *messages, *HELLO]})
        assert answer.status_code == 200, answer.text
        return answer.json()["templated_text"]

    usual = prompt({"role": "assistant", "content": "I will not."})
    assert "I will not." in usual
    assert prompt({"role": "assistant", "content": None, "refusal": "I will not."}) == usual
    assert prompt({"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}) == usual


def test_named_functions_of_older_clients(http: httpx.Client) -> None:
    functions = [tool["function"] for tool in TOOLS]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "add", "content": "2"},
    ]
    old = http.post("/chat_tokenize", json={"messages": messages, "functions": functions}).json()["templated_text"]
    new_messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "name": "add", "tool_call_id": "a", "content": "2"},
    ]
    new = http.post("/chat_tokenize", json={"messages": new_messages, "tools": TOOLS}).json()["templated_text"]
    assert old == new
    forced = {"functions": functions, "function_call": {"name": "sub"}, "max_tokens": 60}
    choice = post(http, CHAT, **forced)["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] is None
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("sub", {"x": 1})
    answer = http.post(CHAT, json={"messages": HELLO, "temperature": 0, "stream": True, **forced})
    choices = [event["choices"][0] for event in read_events(answer.content)[:-1]]
    assert not any("tool_calls" in one["delta"] for one in choices)
    parts = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
    assert [part["name"] for part in parts if "name" in part] == ["sub"]
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    assert choices[-1]["finish_reason"] == "function_call"
    quiet = post(http, CHAT, functions=functions, function_call="none", max_tokens=5)["choices"][0]
    assert "function_call" not in quiet["message"]
    assert refused(http, CHAT, functions=functions, tools=TOOLS)["param"] == "functions"
