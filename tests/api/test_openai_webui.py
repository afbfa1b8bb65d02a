"""What Open WebUI asks of a server, in its own order: models, an answer, then title, tags and follow-ups for it."""

import json
from typing import Any

import httpx2 as httpx
import pytest
from events import DONE, read_events

HEADERS = {
    "authorization": "Bearer sk-anything",
    "x-openwebui-user-name": "Some%20One",
    "x-openwebui-user-id": "b3b1c3f0",
    "x-openwebui-user-email": "someone@example.com",
    "x-openwebui-user-role": "user",
    "x-openwebui-chat-id": "0d3f8f1e",
}
QUESTION = {"role": "user", "content": "What is gravity?"}
TASKS = {
    "title": "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Output:\n"
    'JSON format: { "title": "your concise title here" }',
    "tags": "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history.\n### Output:\n"
    'JSON format: { "tags": ["tag1", "tag2", "tag3"] }',
    "follow_ups": "### Task:\nSuggest 3-5 relevant follow-up questions.\n### Output:\n"
    'JSON format: { "follow_ups": ["Question 1?", "Question 2?"] }',
}


def test_models_are_listed(http: httpx.Client) -> None:
    """Without an answer here the whole server is hidden."""
    listed = http.get("/v1/models", headers=HEADERS)
    assert listed.status_code == 200 and listed.json()["object"] == "list"
    assert all({"id", "object", "created", "owned_by"} <= model.keys() for model in listed.json()["data"])


def test_an_answer_and_what_is_asked_about_it(http: httpx.Client) -> None:
    model = http.get("/v1/models", headers=HEADERS).json()["data"][0]["id"]
    body: dict[str, Any] = {"stream": True, "model": model, "messages": [QUESTION], "temperature": 0, "max_tokens": 24}
    body |= {"stream_options": {"include_usage": True}, "params": {}, "features": {"web_search": False}, "files": []}
    answer = http.post("/v1/chat/completions", json=body, headers=HEADERS)
    assert answer.status_code == 200
    events = read_events(answer.content)
    assert events[-1] == DONE
    chunks = events[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text and chunks[-1]["usage"]["completion_tokens"] == 24
    history = json.dumps([QUESTION, {"role": "assistant", "content": text}])
    for task, words in TASKS.items():
        asked = {"role": "user", "content": f"{words}\n### Chat History:\n<chat_history>\n{history}\n</chat_history>"}
        whole = {"model": model, "messages": [asked], "stream": False, "temperature": 0, "max_completion_tokens": 32}
        given = http.post("/v1/chat/completions", json={**whole, "metadata": {"task": task}}, headers=HEADERS)
        assert given.status_code == 200, given.text
        assert given.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
def test_direct_connections_from_its_page(http: httpx.Client, path: str) -> None:
    """The browser asks first whether a page of another origin may send the key."""
    asked = {"origin": "https://webui.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    leave = http.options(path, headers=asked)
    assert leave.status_code == 200 and leave.headers["access-control-allow-origin"] == "*"
    assert {"authorization", "content-type"} <= set(leave.headers["access-control-allow-headers"].split(","))
