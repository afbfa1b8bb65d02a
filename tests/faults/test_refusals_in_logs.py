"""What the log says of refused requests: enough to find the cause, nothing of what the user wrote."""

import re
import secrets

import pytest

CANARY = "canary-7c1f-of-a-user"
WRONG_BEST_OF = {"inputs": CANARY, "parameters": {"best_of": 99, "do_sample": True}}
MESSAGES = [{"role": "user", "content": CANARY}]


def lines_of(server, request_id: str) -> list[str]:
    marked = f"request_id={request_id}"
    server.wait_for(lambda: any(marked in line for line in server.lines), "a line in the log")
    return [line for line in server.lines if marked in line]


# Route, body, status, and the fields of the line.
REFUSED = [
    ("/generate", WRONG_BEST_OF, 422, {"error_type": "validation", "field": "best_of"}),
    ("/generate_stream", WRONG_BEST_OF, 200, {"error_type": "validation", "field": "best_of"}),
    ("/generate", {"inputs": CANARY, "parameters": {"top_k": CANARY}}, 422, {"field": "parameters.top_k"}),
    ("/generate", {"parameters": {}, CANARY: CANARY}, 422, {"field": "inputs"}),
    ("/tokenize", {"inputs": [CANARY]}, 422, {"field": "inputs"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "top_p": 7}, 400, {"error_type": "validation", "field": "top_p"}),
    ("/v1/chat/completions", {"messages": [{"content": CANARY}]}, 400, {"field": "messages[0].role"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": CANARY}, 400, {"field": "max_tokens"}),
    (
        "/v1/completions",
        {"prompt": CANARY, "temperature": -1},
        400,
        {"error_type": "validation", "field": "temperature"},
    ),
    ("/v1/completions", {"prompt": CANARY, "suffix": CANARY}, 400, {"error_type": "validation", "field": "suffix"}),
    (
        "/generate",
        {"inputs": CANARY, "parameters": {"grammar": {"type": "regex", "value": f"({CANARY}"}}},
        422,
        {"error_type": "validation", "field": "grammar"},
    ),
    (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": CANARY},
        400,
        {"error_type": "tool_error"},
    ),
    ("/vertex", {"instances": []}, 422, {"field": "instances"}),
    (
        "/vertex",
        {"instances": [{"inputs": CANARY, "parameters": {"max_new_tokens": 0}}]},
        500,
        {"field": "max_new_tokens"},
    ),
]


@pytest.mark.parametrize(("route", "body", "status", "expected"), REFUSED)
def test_status_route_and_field(server, http, route, body, status, expected):
    request_id = secrets.token_hex(8)
    answer = http.post(route, json=body, headers={"x-request-id": request_id})
    assert answer.status_code == status
    (line,) = lines_of(server, request_id)
    pairs = dict(re.findall(r"(\w+)=(\S+)", line))
    assert {name: pairs.get(name) for name in ("route", "status", *expected)} == {
        "route": route,
        "status": str(status),
        **expected,
    }
    assert CANARY not in server.log


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "expected"),
    [
        ("POST", "/generate", b"{", 400, "route=/generate status=400"),
        ("POST", "/v1/completions", f'{{"{CANARY}'.encode(), 400, "route=/v1/completions status=400"),
        ("POST", "/generate", b"\xff" + CANARY.encode(), 400, "route=/generate status=400"),
        ("POST", "/generate", b'{"x":' + b"[" * 5_000, 400, "route=/generate status=400"),
        ("POST", f"/{CANARY}", b"", 404, "route=unknown status=404"),
        ("GET", f"/v1/{CANARY}", b"", 404, "route=unknown status=404"),
        ("GET", "/generate", b"", 405, "route=unknown status=405"),
    ],
)
def test_bodies_that_are_no_json_and_unknown_paths(server, http, method, path, content, status, expected):
    request_id = secrets.token_hex(8)
    headers = {"x-request-id": request_id, "content-type": "application/json"}
    assert http.request(method, path, content=content, headers=headers).status_code == status
    (line,) = lines_of(server, request_id)
    assert line.endswith(expected) and CANARY not in server.log


def test_a_wrong_content_type(server, http):
    request_id = secrets.token_hex(8)
    headers = {"x-request-id": request_id, "content-type": "text/plain"}
    assert http.post("/generate", content=CANARY, headers=headers).status_code == 415
    (line,) = lines_of(server, request_id)
    assert line.endswith("route=/generate status=415 field=content-type")
