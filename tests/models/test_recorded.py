"""Tokens, seeded draws and log-probabilities are those that were recorded once: no refactoring changes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from recorded import FAMILIES, FILE, answers, compare

pytestmark = pytest.mark.usefixtures("one_thread")

PATHS: dict[str, dict[str, Any]] = {
    "native-kernels": {},
    "torch-ops": {"custom_kernels": False},
    "small-chunks": {"max_batch_prefill_tokens": 16, "prefix_caching": False},
    "preempted": {"max_batch_total_tokens": 256, "max_total_tokens": 96},
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[dict[str, Any]]]:
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_answers_are_as_recorded(family: str, path: str, recorded: dict[str, Any], tmp_path: Path) -> None:
    compare(answers(family, tmp_path, **PATHS[path]), recorded[family])
