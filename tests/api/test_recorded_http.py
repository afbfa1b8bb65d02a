"""Answers over HTTP are, byte for byte, those that were recorded once: no refactoring changes them."""

import json
from typing import Any

import httpx2 as httpx
import pytest
from recorded_http import CASES, FILE, ask, check


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("name", list(CASES))
def test_answers_are_as_recorded(name: str, http: httpx.Client, recorded: dict[str, Any]) -> None:
    check(ask(http, name), recorded[name])
