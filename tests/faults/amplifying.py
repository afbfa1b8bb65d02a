"""Requests that make the server work or answer more than they are, on every route, for test_amplification.py and
bench/amplification.py: what comes back, what it costs the api process, and what its event loop noticed.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
from serving import Server

Body = dict[str, Any]
HOT = 1e8  # a temperature at which all tokens are as likely
SPACES = " " * 4000
TOOLS = [
    {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object", "properties": {}}}}
    for n in range(12)
]


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Body
    num_tokens: int = 0  # generated at most
    num_tops: int = 0  # alternatives asked for with each
    method: str = "POST"


def native(name: str, inputs: str, num_tokens: int, path: str = "/generate", tops: int = 0, **parameters: Any) -> Case:
    parameters = {"max_new_tokens": num_tokens, **parameters} | ({"top_n_tokens": tops} if tops else {})
    return Case(name, path, {"inputs": inputs, "parameters": parameters}, num_tokens, tops)


def chat(name: str, num_tokens: int, tops: int = 0, **fields: Any) -> Case:
    body: Body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": num_tokens, **fields}
    return Case(name, "/v1/chat/completions", body, num_tokens, tops)


def cases() -> list[Case]:
    """Every route that takes a body, and each parameter that makes answers longer."""
    return [
        native("plain", "x", 100),
        native("stream", "x", 100, "/generate_stream"),
        native("compat", "x", 100, "/"),
        native("details", "x", 100, details=True),
        native("ties", "x", 100, details=True, tops=5, temperature=HOT),
        native("ties in a stream", "x", 100, "/generate_stream", details=True, tops=5, temperature=HOT),
        native("warmest", "x", 100, details=True, tops=5, temperature=2.0),
        native("penalties", "x", 100, repetition_penalty=1e30, frequency_penalty=2.0),
        native("best of", "x", 100, details=True, tops=5, do_sample=True, best_of=2),
        native("full text", "x " * 900, 1, return_full_text=True),
        native("seed", "x", 100, seed=2**64 - 1, do_sample=True),
        native("stops", "x", 100, stop=["q" * 900] * 4),
        native("regular expression", "x", 20, grammar={"type": "regex", "value": "((a{1,60}){1,60}){1,9}"}),
        native("schema", "x", 20, grammar={"type": "json", "value": deep_schema(8)}),
        chat("chat", 100),
        chat("chat stream", 100, stream=True, stream_options={"include_usage": True}),
        chat("choices", 4 * 25, n=4, temperature=1.5, stream=True),
        chat("chat log-probabilities", 100, tops=20, logprobs=True, top_logprobs=20),
        chat("chat log-probabilities, hot", 100, tops=20, logprobs=True, top_logprobs=20, temperature=2, stream=True),
        chat("tools", 20, tools=TOOLS, tool_choice="required"),
        chat("format", 20, response_format={"type": "json_object"}),
        Case("completions", "/v1/completions", {"prompt": ["x"] * 4, "max_tokens": 50}, 200),
        Case(
            "completions with everything",
            "/v1/completions",
            {"prompt": "x " * 400, "max_tokens": 50, "logprobs": 5, "echo": True, "n": 2, "stream": True},
            100,
            5,
        ),
        Case(
            "a prompt that is scored",
            "/v1/completions",
            {"prompt": "x " * 450, "max_tokens": 0, "logprobs": 5, "echo": True},
            900,  # a word and a space each; none is generated, all are told
            5,
        ),
        Case("tokenize", "/tokenize", {"inputs": "a b" * 5000}),
        Case("tokenize spaces", "/tokenize", {"inputs": SPACES}),
        Case("chat_tokenize", "/chat_tokenize", {"messages": [{"role": "user", "content": "a b" * 5000}]}),
        Case("invocations", "/invocations", {"inputs": "x", "parameters": {"max_new_tokens": 50}}, 50),
        Case("vertex", "/vertex", {"instances": [{"inputs": "x", "parameters": {"max_new_tokens": 20}}] * 4}, 80),
        Case("not JSON", "/generate", {"inputs": ["x"] * 1000}),
        Case("unknown fields", "/v1/chat/completions", {"messages": [], **{f"field{n}": n for n in range(2000)}}),
        Case("info", "/info", {}, method="GET"),
        Case("metrics", "/metrics", {}, method="GET"),
        Case("openapi", "/api-doc/openapi.json", {}, method="GET"),
        Case("docs", "/docs", {}, method="GET"),
    ]


def deep_schema(depth: int) -> Body:
    schema: Body = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


@dataclass(frozen=True)
class Cost:
    status: int
    bytes_in: int
    bytes_out: int
    seconds: float
    api_cpu_s: float
    api_growth_mb: float  # of the api process while it answered, at its most

    @property
    def amplification(self) -> float:
        return self.bytes_out / self.bytes_in


def measure(server: Server, client: httpx.Client, case: Case) -> Cost:
    pid = server.children()["api"]
    data = json.dumps(case.body).encode() if case.method == "POST" else b""
    memory, cpu, begin = memory_mb(pid), cpu_s(pid), time.perf_counter()
    most, size = memory, 0
    with client.stream(case.method, case.path, content=data, headers={"content-type": "application/json"}) as response:
        for piece in response.iter_raw():
            size += len(piece)
            most = max(most, memory_mb(pid))
    head = len(f"{case.method} {case.path}") + 100
    return Cost(
        response.status_code,
        len(data) + head,
        size,
        time.perf_counter() - begin,
        cpu_s(pid) - cpu,
        max(most, memory_mb(pid)) - memory,
    )


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
