"""The Messages and the Responses API over HTTP: agents' requests, hostile ones, keys, and the prefix cache."""

import json
import threading
from typing import Any

import httpx2 as httpx
import pytest
from openai_calls import HELLO, WEATHER, chat
from serving import Server

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0, "model": "claude-x"}


def ask(http: httpx.Client, path: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={**GREEDY, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(path, json={**GREEDY, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    assert "[DONE]" not in answer.text
    frames = [frame.split("\n") for frame in answer.text.split("\n\n")[:-1] if frame != ":"]
    told = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in told]
    return told


def test_three_apis_one_answer(http: httpx.Client) -> None:
    """The same prompt, token for token, and the same answer."""
    one = chat(http, messages=HELLO, temperature=0, max_tokens=12)
    text, usage = one["choices"][0]["message"]["content"], one["usage"]
    message = ask(http, MESSAGES, messages=HELLO, max_tokens=12)
    response = ask(http, RESPONSES, input=HELLO, max_output_tokens=12)
    assert [block["text"] for block in message["content"]] == [text]
    assert [part["text"] for part in response["output"][0]["content"]] == [text]
    told = message["usage"]
    counts = [
        (told["input_tokens"] + told["cache_read_input_tokens"], told["output_tokens"]),
        (response["usage"]["input_tokens"], response["usage"]["output_tokens"]),
    ]
    assert counts == [(usage["prompt_tokens"], usage["completion_tokens"])] * 2
    deltas = [
        e["delta"]["text"]
        for e in events(http, MESSAGES, messages=HELLO, max_tokens=12)
        if "index" in e and "delta" in e
    ]
    assert "".join(deltas) == text
    deltas = [e["delta"] for e in events(http, RESPONSES, input=HELLO, max_output_tokens=12) if "delta" in e]
    assert "".join(deltas) == text


def test_requests_of_claude_code(http: httpx.Client, server: Server) -> None:
    """Many tools, blocks that are cached, betas, fields nobody knows, and a first block that differs each time."""
    tools = [
        {"name": f"tool_{n}", "description": "It does.", "input_schema": {"type": "object", "properties": {}}}
        for n in range(8)
    ]
    tools.append({"type": "web_search_20250305", "name": "web_search"})
    before = server.metrics().get("tgi_unknown_fields", 0)
    read: list[int] = []
    for number in range(2):
        head = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
        cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        answer = http.post(
            MESSAGES + "?beta=true",
            headers={
                "x-api-key": "k", "authorization": "Bearer k", "anthropic-version": "2026-10-21",
                "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "x-app": "cli",
            },
            json={
                "model": "claude-sonnet-4-5",
                "max_tokens": 4,
                "temperature": 1,
                "system": [
                    {"type": "text", "text": head},
                    {"type": "text", "text": "You are Claude Code.", **cached},
                    {"type": "text", "text": "Be brief. " * 20, **cached},
                ],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
                    {"role": "user", "content": [{"type": "text", "text": "Hello", **cached}]},
                ],
                "tools": tools,
                "metadata": {"user_id": "user_1_account__session_2"},
                "thinking": {"type": "adaptive"},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "high"},
                "stream": False,
            },
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        usage = answer.json()["usage"]
        read.append(usage["cache_read_input_tokens"])
        assert usage["input_tokens"] > 0
    assert read[1] >= 64  # all but the last block of the prompt: what differed was no part of it
    assert server.metrics()["tgi_unknown_fields"] > before


def test_requests_of_codex(http: httpx.Client) -> None:
    """It streams always, stores nothing, and sends tools and items that only OpenAI's own server knows."""
    look = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}}
    others = [{"type": "web_search", "external_web_access": True}, {"type": "namespace", "name": "mcp", "tools": []}]
    custom = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
    }
    call = {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": "{}"}
    told = events(
        http,
        RESPONSES,
        instructions="You are a coding agent.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Run it."}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAB"},
            call,
            {"type": "function_call_output", "call_id": "call_1", "output": "done"},
            {"type": "compaction", "encrypted_content": "x"},
        ],
        tools=[look, custom, *others],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        text={"verbosity": "medium"},
        client_metadata={"x": "y"},
        max_output_tokens=4,
    )
    final = told[-1]["response"]
    assert (final["status"], final["store"], final["usage"]["output_tokens"]) == ("incomplete", False, 4)
    assert http.get(f"{RESPONSES}/{final['id']}").status_code == 404


def test_inner_system_words_and_prefill(http: httpx.Client) -> None:
    turns = [*HELLO, {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "One: red. Two:"}]
    text = ask(http, MESSAGES, messages=turns, max_tokens=6)["content"][0]["text"]
    same = [turns[0], turns[1], turns[2]]
    assert text == chat(http, messages=same, temperature=0, max_tokens=6)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}, {"type": "auto"}], ids=str)
def test_tools_of_messages(http: httpx.Client, choice: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    tools = [{"name": "look", "description": "Look", "input_schema": {**schema, "additionalProperties": False}}]
    body = {"messages": WEATHER, "tools": tools, "tool_choice": choice, "max_tokens": 60}
    whole = ask(http, MESSAGES, **body)
    told = events(http, MESSAGES, **body)
    if choice["type"] != "auto":
        assert whole["stop_reason"] == "tool_use"
        assert {block["type"] for block in whole["content"]} == {"tool_use"}
    pieces = [e["delta"]["partial_json"] for e in told if e.get("delta", {}).get("type") == "input_json_delta"]
    inputs = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    assert "".join(pieces).replace(" ", "") == "".join(json.dumps(value) for value in inputs).replace(" ", "")


def test_logprobs_of_responses(http: httpx.Client) -> None:
    body = {"input": HELLO, "max_output_tokens": 5, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    (part,) = ask(http, RESPONSES, **body)["output"][0]["content"]
    assert len(part["logprobs"]) == 5
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in part["logprobs"])
    told = events(http, RESPONSES, **body)
    streamed = [token for event in told if event["type"].endswith("text.delta") for token in event["logprobs"]]
    assert [token["token"] for token in streamed] == [token["token"] for token in part["logprobs"]]


def test_conversations_by_id(http: httpx.Client) -> None:
    first = ask(http, RESPONSES, input="My name is Anna.", instructions="Be kind.", max_output_tokens=8)
    counted = http.post(RESPONSES + "/input_tokens", json={"input": "Hi", "previous_response_id": first["id"]}).json()
    assert counted["object"] == "response.input_tokens"
    second = ask(http, RESPONSES, input="Hi", previous_response_id=first["id"], max_output_tokens=8)
    assert second["usage"]["input_tokens"] == counted["input_tokens"] > first["usage"]["input_tokens"]
    assert (second["instructions"], second["previous_response_id"]) == (None, first["id"])
    item = first["output"][0]["id"]
    given = [
        {"role": "user", "content": "My name is Anna."},
        {"type": "item_reference", "id": item},
        {"role": "user", "content": "Hi"},
    ]
    by_item = ask(http, RESPONSES, input=given, max_output_tokens=8)
    assert by_item["usage"]["input_tokens"] == counted["input_tokens"]
    assert http.get(f"{RESPONSES}/{first['id']}").json() == first
    assert http.delete(f"{RESPONSES}/{first['id']}").json()["deleted"]
    assert http.get(f"{RESPONSES}/{first['id']}").status_code == 404
    streamed = events(http, RESPONSES, input="Hi", max_output_tokens=4)[-1]["response"]
    assert http.get(f"{RESPONSES}/{streamed['id']}").json() == streamed


def test_what_is_not_stored_is_told(http: httpx.Client) -> None:
    """A conversation and what is told back may each be small enough, and the two together too large."""
    given = [{"type": "note", "text": "x" * 1_200_000}, {"role": "user", "content": "Hi"}]
    first = ask(http, RESPONSES, input=given, max_output_tokens=1)
    assert first["store"]
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 1, "metadata": {"a": "z" * 1_000_000}}
    whole = ask(http, RESPONSES, previous_response_id=first["id"], **body)
    last = events(http, RESPONSES, previous_response_id=first["id"], **body)[-1]["response"]
    for answer in (whole, last):
        assert not answer["store"] and http.get(f"{RESPONSES}/{answer['id']}").status_code == 404


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
    ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [{"type": {"a": "b"}, "name": "a", "input_schema": {}}]}, "tools[0].type"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool"}}, "name"),
    ({"system": 3}, "system"),
    ({"model": "x" * 2000}, "`model`"),
    ({"thinking": {"type": 3}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "grammar"),
]


@pytest.mark.parametrize(("change", "name"), HOSTILE, ids=lambda value: str(value)[:60])
def test_hostile_messages(http: httpx.Client, change: dict[str, Any], name: str) -> None:
    answer = http.post(MESSAGES, json={"model": "m", "max_tokens": 4, "messages": HELLO, **change})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert list(body) == ["type", "error", "request_id"] and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert name in body["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": []}]}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input"),
        ({"input": "x " * 3000}, "input"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_hostile_responses(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    answer = http.post(RESPONSES, json={"input": "x", "max_output_tokens": 4, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error


def test_what_is_told_back_may_be_too_deep(http: httpx.Client) -> None:
    """Some depth can just be read, and not be written with the answer around it: that is told, not an empty stream."""
    statuses: set[int] = set()
    for depth in range(930, 1000):
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"input":"x","max_output_tokens":1,"stream":true,"metadata":{"a":' + deep + b"}}"
        answer = http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
        statuses.add(answer.status_code)
        assert answer.status_code == 400 or "response.incomplete" in answer.text or "event: error" in answer.text
    assert statuses == {200, 400}


def test_prompts_that_are_too_long(http: httpx.Client) -> None:
    """In the words by which agents know that they have to shorten the conversation."""
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x " * 3000}]}
    error = http.post(MESSAGES, json=body).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ") and " tokens > 1024 maximum" in error["message"]
    counted = http.post(MESSAGES + "/count_tokens", json={key: body[key] for key in ("model", "messages")})
    assert counted.json()["input_tokens"] > 3000  # it is counted all the same


def test_other_failures_have_the_shape_of_their_api(http: httpx.Client) -> None:
    for path, status, kind in (
        (MESSAGES + "/batches", 404, "not_found_error"),
        (MESSAGES, 405, "invalid_request_error"),
    ):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.headers["request-id"]
    broken = http.post(MESSAGES, content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    plain = http.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"})
    assert (plain.status_code, plain.json()["type"]) == (415, "error")


def test_models_in_both_shapes(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["object"] == "list"
    found = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert found["data"][0]["type"] == "model" and found["first_id"] == found["data"][0]["id"]
    assert http.get(f"/v1/models/{found['first_id']}", headers={"anthropic-version": "x"}).json() == found["data"][0]


def test_clients_that_leave(http: httpx.Client, server: Server) -> None:
    """What runs for them ends, and the next ones are served."""
    for path, body in (
        (MESSAGES, {"messages": HELLO, "max_tokens": 900}),
        (RESPONSES, {"input": "Count to a thousand.", "max_output_tokens": 900}),
    ):
        before = server.metrics().get('tgi_request_failure{err="dropped"}', 0)
        with http.stream("POST", path, json={**GREEDY, **body, "stream": True}) as answer:
            next(answer.iter_lines())
        gone = threading.Event()
        for _ in range(200):
            if server.metrics().get('tgi_request_failure{err="dropped"}', 0) > before:
                break
            gone.wait(0.05)
        else:
            raise AssertionError(path)
    assert chat(http, messages=HELLO, max_tokens=2)["choices"]
