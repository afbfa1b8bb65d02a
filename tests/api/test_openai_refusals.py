"""What `/v1` refuses, in OpenAI's shape."""

import re

import httpx2 as httpx
import pytest
from openai_calls import CHAT, COMPLETIONS, HELLO, chat, complete, refused


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_not_served_is_refused_by_name(http: httpx.Client, path: str) -> None:
    values = {"guided_grammar": "root ::= a", "use_beam_search": True, "bad_words": ["a"], "allowed_token_ids": [1]}
    values |= {"audio": {}, "web_search_options": {}} if path == CHAT else {"suffix": "x"}
    for name, value in values.items():
        error = refused(http, path, 400, **{name: value})
        assert (error["param"], name in error["message"]) == (name, True)
    assert refused(http, path, structured_outputs={"grammar": "root ::= a"})["param"] == "structured_outputs"
    assert refused(http, path, model="x" * 2000)["param"] == "model"  # every event of a stream would have it
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
        ("POST", "/v1/responses/x/cancel", 404),
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
