"""`response_format`, in OpenAI's and TGI's forms, alone and beside tools."""

import json
import re

import httpx2 as httpx
import pytest
from openai_calls import (
    CHAT,
    PERSON,
    TOOLS,
    WEATHER,
    chat,
    check_calls,
    joined,
    reasons,
    refused,
    stream,
    streamed_calls,
)

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
