"""Tool calls: forced, chosen, streamed, fed back."""

import json

import httpx2 as httpx
import pytest
from openai_calls import (
    CHAT,
    HELLO,
    TOOLS,
    WEATHER,
    chat,
    check_calls,
    joined,
    reasons,
    refused,
    rendered,
    stream,
    streamed_calls,
)


@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ("required", None, ["get_weather", "add"]),
        ("required", False, ["get_weather", "add"]),
        ({"type": "function", "function": {"name": "add"}}, None, ["add"]),
        ("get_weather", None, ["get_weather"]),  # TGI's form
        ({"function": {"name": "get_weather"}}, False, ["get_weather"]),
    ],
    ids=str,
)
def test_forced_calls(http: httpx.Client, choice: object, names: list[str], parallel: bool | None) -> None:
    body = {
        "messages": WEATHER,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 150,
        "temperature": 0,
    }
    whole = chat(http, **body)["choices"][0]
    calls = check_calls(whole["message"], set(names))
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
