"""Calls of the `/v1` routes, with the checks that every answer must pass; the model of the shared server answers."""

import json

import httpx2 as httpx
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


def rendered(http: httpx.Client, **body: object) -> str:
    answer = http.post("/chat_tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["templated_text"]


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


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
