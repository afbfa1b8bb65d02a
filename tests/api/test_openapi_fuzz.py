"""Requests made up from our own OpenAPI document, valid and not: never a 5xx, never a crash."""

import json
from typing import Any, cast

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from serving import Server

from text_generation_inference.api.routes import document

MAX_EXAMPLES = 10  # of each operation and mode; making them up takes longer than sending them
DOCUMENT = json.loads(msgspec.json.encode(document()))
OPERATIONS: list[Any] = [
    cast(Any, result).ok() for result in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
]


def test_the_document_is_the_one_that_is_served(server: Server) -> None:
    with server.client() as http:
        assert http.get("/api-doc/openapi.json").json() == DOCUMENT
    assert len(OPERATIONS) > 15


def shorten(body: Any) -> None:
    """Let a generation end soon: this is about requests, not about the model."""
    if not isinstance(body, dict):
        return
    for name in ("messages", "prompt"):
        if name in body:
            body["max_tokens"] = 2
            body.pop("max_completion_tokens", None)
            if isinstance(body.get("n"), int):
                body["n"] = min(body["n"], 3)
    for name in ("inputs", "id"):
        if name in body and isinstance(body.get("parameters"), dict | None):
            body["parameters"] = {**(body.get("parameters") or {}), "max_new_tokens": 2}
    instances = body.get("instances")
    for instance in instances if isinstance(instances, list) else []:
        shorten(instance)


def is_the_contract(path: str, answer: Any) -> bool:
    """Vertex AI and KServe answer every failure of a generation, a refused one too, with this."""
    error = {"error": "Incomplete generation", "error_type": "Incomplete generation"}
    return path.startswith(("/vertex", "/v2/")) and answer.status_code == 500 and answer.json() == error


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_failure_of_the_server(server: Server, operation: Any, mode: schemathesis.GenerationMode) -> None:
    if mode.is_negative and not (operation.body or operation.path_parameters):
        return  # nothing that could be wrong

    @settings(
        max_examples=MAX_EXAMPLES if operation.body else 2,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        shorten(case.body)
        answer = case.call(base_url=server.url, timeout=60)
        if not is_the_contract(case.path, answer):
            case.validate_response(answer, checks=[not_a_server_error])

    try:
        send()
    except Unsatisfiable:
        assert mode.is_negative  # any text is a valid part of a path
    assert server.process.poll() is None


def test_still_healthy(server: Server) -> None:
    """Runs after the others of this file."""
    with server.client() as http:
        assert http.get("/health").status_code == 200
        body = {"inputs": "Count: one, two,", "parameters": {"max_new_tokens": 4}}
        assert http.post("/generate", json=body).json() == {"generated_text": " three, four,"}
    assert "a route failed" not in server.log
