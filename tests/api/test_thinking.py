"""A model whose template opens its thoughts, over HTTP: budgets, formats and calls behind thoughts, in several APIs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from events import read_events
from serving import Server

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}"
)
TURNS = [{"role": "user", "content": "What is 2+2?"}]
NUMBER = {"type": "object", "properties": {"a": {"enum": [4, 5]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "parameters": NUMBER}}


@pytest.fixture(scope="module")
def thinker(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = tmp_path_factory.mktemp("thinker") / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": TEMPLATE}))
    limits = ("--max-total-tokens", "256", "--max-batch-total-tokens", "4096")
    running = Server(*limits, "--ollama-api", "--tokenizer-config-path", str(config), cache=model_cache)
    with running.client() as client:
        yield client
    assert running.stop() == 0, running.log[-3000:]


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": TURNS, "temperature": 0, "max_tokens": 40, **fields}
    return http.post("/v1/chat/completions", json=body).raise_for_status().json()


def tokens_of(choice: dict[str, Any]) -> list[str]:
    return [token["token"] for token in choice["logprobs"]["content"]]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_budgets_are_exact(thinker: httpx.Client, budget: int) -> None:
    fields = {"logprobs": True, "ignore_eos": True}
    free = tokens_of(ask(thinker, **fields)["choices"][0])
    choice = ask(thinker, **fields, thinking_token_budget=budget)["choices"][0]
    tokens = tokens_of(choice)
    assert tokens[:budget] == free[:budget]
    assert "".join(tokens[budget:]).startswith("</think>")
    thoughts = choice["message"].get("reasoning_content", "")
    assert thoughts == "".join(free[:budget]).strip() and "</think>" not in choice["message"]["content"]
    stream = {
        "messages": TURNS,
        "temperature": 0,
        "max_tokens": 40,
        "stream": True,
        "thinking_budget": budget,
        **fields,
    }
    *events, done = read_events(thinker.post("/v1/chat/completions", json=stream).content)
    assert done == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]


def test_tokens_of_thoughts_are_all_counted(thinker: httpx.Client) -> None:
    """White space among them is held back until it is known what follows, and counts all the same."""
    answer = ask(thinker, response_format={"type": "regex", "value": "[0-9]{3}"}, logprobs=True)
    choice, told = answer["choices"][0], answer["usage"]
    assert choice["finish_reason"] == "length" and "\n" in choice["message"]["reasoning_content"]
    tokens = tokens_of(choice)
    num_spaces = next(number for number, token in enumerate(reversed(tokens)) if token.strip())
    assert told["completion_tokens_details"]["reasoning_tokens"] == len(tokens) - num_spaces


def test_each_choice_has_a_budget(thinker: httpx.Client) -> None:
    answer = ask(thinker, n=3, temperature=1, seed=3, thinking_budget=4, logprobs=True)
    for choice in answer["choices"]:
        assert "".join(tokens_of(choice)[4:]).startswith("</think>")


def test_formats_and_calls_come_behind_thoughts(thinker: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
    message = ask(thinker, response_format=form, thinking_budget=8)["choices"][0]["message"]
    assert message["reasoning_content"] and json.loads(message["content"])["a"] in (4, 5)
    message = ask(thinker, response_format=form, enable_thinking=False)["choices"][0]["message"]
    assert "reasoning_content" not in message and json.loads(message["content"])["a"] in (4, 5)
    message = ask(thinker, tools=[TOOL], tool_choice="required", thinking_budget=8)["choices"][0]["message"]
    assert message["reasoning_content"] and message["content"] is None
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["a"] in (4, 5)


def test_no_mark_gets_into_a_format_without_thoughts(thinker: httpx.Client) -> None:
    """Where thoughts are not told apart a format begins with the answer, and a budget has nothing to end."""
    text = {"type": "string", "minLength": 16, "maxLength": 24}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    told = [
        ask(thinker, response_format=form, separate_reasoning=False, **given)["choices"][0]["message"]["content"]
        for given in ({}, {"thinking_budget": 2}, {"thinking_budget": 7})
    ]
    assert told == [told[0]] * 3 and json.loads(told[0])["a"]


def test_budgets_of_other_apis(thinker: httpx.Client) -> None:
    expected = ask(thinker, thinking_budget=6)["choices"][0]["message"]["reasoning_content"]
    body = {"model": "x", "messages": TURNS, "temperature": 0, "max_tokens": 20}
    answer = thinker.post("/v1/messages", json={**body, "thinking": {"type": "enabled", "budget_tokens": 6}}).json()
    assert answer["content"][0]["thinking"] == expected


def test_ollama_tells_thoughts(thinker: httpx.Client) -> None:
    body = {"model": "x", "messages": TURNS, "options": {"temperature": 0, "num_predict": 12}}
    whole = thinker.post("/api/chat", json={**body, "think": True, "stream": False}).json()
    assert whole["message"]["thinking"] and whole["message"]["content"] == ""
    answer = thinker.post("/api/chat", json=body)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert "".join(line["message"].get("thinking", "") for line in lines) == whole["message"]["thinking"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    off = thinker.post("/api/generate", json={"model": "x", "prompt": "Hi", "think": False, "stream": False}).json()
    assert "thinking" not in off and off["response"]
    assert "thinking" in thinker.post("/api/show", json={"model": "x"}).json()["capabilities"]


def test_ollama_bodies_of_any_type(thinker: httpx.Client) -> None:
    """As curl sends Ollama's examples, and LiteLLM without a type at all; from pages JSON alone, which they must ask for."""
    options = {"temperature": 0, "num_predict": 2}
    body = {"model": "x", "prompt": "Hi", "messages": TURNS, "options": options, "stream": False}
    curl, plain = "application/x-www-form-urlencoded", "text/plain"
    for path in ("/api/chat", "/api/generate", "/api/show"):

        def send(path: str = path, **headers: str) -> int:
            return thinker.post(path, content=json.dumps(body).encode(), headers=headers).status_code

        assert [send(), send(**{"content-type": curl}), send(**{"content-type": plain})] == [200] * 3
        page = {"origin": "https://page.example"}
        assert [send(**page), send(**page, **{"content-type": plain})] == [415] * 2
        assert send(**page, **{"content-type": "application/json"}) == 200
    assert thinker.post("/api/chat", content=b"{").status_code == 400
    assert thinker.post("/generate", content=b'{"inputs": "Hi"}').status_code == 415


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", {"messages": TURNS, "thinking_budget": -2}, 400, "`thinking_budget` must be >= 0"),
        ("/v1/chat/completions", {"messages": TURNS, "thinking_token_budget": "x"}, 400, "thinking_token_budget"),
        ("/api/chat", {"messages": TURNS}, 400, "model"),
        ("/api/chat", {"model": "x", "messages": TURNS, "format": "xml"}, 400, "`format`"),
        ("/api/chat", {"model": "x", "messages": TURNS, "options": {"num_predict": 10**30}}, 400, "num_predict"),
        ("/api/generate", {"model": "x", "prompt": "a", "suffix": "b"}, 400, "`suffix` is not supported"),
        ("/api/generate", {"model": "x", "prompt": "a " * 500}, 400, "tokens"),
        ("/api/generate", {"model": "x" * 2000, "prompt": "a", "raw": True}, 400, "`model` must have at most"),
        ("/api/pull", {"model": "x"}, 404, "/api/pull"),
    ],
)
def test_what_is_refused(thinker: httpx.Client, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = thinker.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in (error if path.startswith("/api/") else error["message"])
