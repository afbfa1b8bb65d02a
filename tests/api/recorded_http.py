"""Bytes of the server's answers, streams included, and the same as recorded once: what no refactoring may change.

    PYTHONPATH=src:tests:tests/api python tests/api/recorded_http.py      # writes them anew: only where a change is meant

Ids and times are left out, and numbers rounded: the last digits of a log-probability are the machine's.
"""

import json
import re
from pathlib import Path
from typing import Any

import httpx2 as httpx
from serving import Server

FILE = Path(__file__).parents[1] / "data" / "recorded" / "http.json"
PROMPT = "Count: one, two, three,"
HELLO = [{"role": "user", "content": "Name three colours."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
DETAILS = {"max_new_tokens": 6, "details": True, "decoder_input_details": True, "top_n_tokens": 2}
SEEDED = {"max_new_tokens": 8, "do_sample": True, "seed": 42, "temperature": 0.8, "top_p": 0.9, "details": True}
GREEDY = {"max_tokens": 10, "temperature": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}),
    "generate-details": ("/generate", {"inputs": PROMPT, "parameters": DETAILS}),
    "generate-seeded": ("/generate", {"inputs": PROMPT, "parameters": SEEDED}),
    "generate-stop": ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "stop": [" six"]}}),
    "generate-grammar": (
        "/generate",
        {"inputs": "Age:", "parameters": {"max_new_tokens": 20, "grammar": {"type": "json", "value": SCHEMA}}},
    ),
    "generate-error": ("/generate", {"inputs": PROMPT, "parameters": {"top_p": 2}}),
    "stream": ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 6, "top_n_tokens": 2}}),
    "stream-seeded": ("/generate_stream", {"inputs": PROMPT, "parameters": SEEDED}),
    "compatible": ("/", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "return_full_text": True}}),
    "compatible-stream": ("/", {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 4}}),
    "tokenize": ("/tokenize", {"inputs": PROMPT}),
    "chat": ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **GREEDY}),
    "chat-stream": (
        "/v1/chat/completions",
        {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, **GREEDY},
    ),
    "chat-tools": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40, "temperature": 0},
    ),
    "chat-tools-stream": (
        "/v1/chat/completions",
        {
            "messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40, "temperature": 0,
            "stream": True,
        },
    ),
    "chat-error": ("/v1/chat/completions", {"messages": HELLO, "temperature": 9}),
    "completions": ("/v1/completions", {"prompt": PROMPT, "logprobs": 2, "echo": True, **GREEDY}),
    "completions-stream": ("/v1/completions", {"prompt": "Red,", "stream": True, **GREEDY}),
}  # fmt: skip

_TIMES = re.compile(rb'"created":\d+|"cached_tokens":\d+')  # what is cached depends on the requests before
_IDS = re.compile(rb'"id":"[^"]*"|"tool_call_id":"[^"]*"')
_TENTHS = re.compile(r"-?\d+\.\d")
_NUMBERS = re.compile(rb"-?\d+\.\d+(?:e-?\d+)?")


def ask(client: httpx.Client, name: str) -> dict[str, Any]:
    """Status, kind and body of one case, without what differs from call to call."""
    path, body = CASES[name]
    answer = client.post(path, json=body)
    text = _IDS.sub(b'"id":""', _TIMES.sub(b'"":0', answer.content))
    rounded = _NUMBERS.sub(lambda found: b"%.1f" % (float(found[0]) + 0.0), text)
    return {"status": answer.status_code, "type": answer.headers["content-type"], "body": rounded.decode()}


def check(found: dict[str, Any], kept: dict[str, Any]) -> None:
    """The same bytes, but for the last digit of rounded numbers."""
    assert (found["status"], found["type"]) == (kept["status"], kept["type"])
    assert _TENTHS.sub("#", found["body"]) == _TENTHS.sub("#", kept["body"])
    pairs = zip(_TENTHS.findall(found["body"]), _TENTHS.findall(kept["body"]), strict=True)
    assert all(abs(float(a) - float(b)) < 0.15 for a, b in pairs)  # rounded to tenths, perhaps to either side


def main() -> None:
    server = Server("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    with server.client() as client:
        found = {name: ask(client, name) for name in CASES}
    server.stop()
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
