"""What was recorded on a CPU before CUDA and Gaudi became paths of one engine is what a device answers, but for rounding."""

import json
from pathlib import Path
from typing import Any

import pytest
from recorded import FAMILIES, FILE, answers, compare

PATHS: dict[str, dict[str, Any]] = {
    "captured": {},
    "small-chunks": {"max_batch_prefill_tokens": 16, "prefix_caching": False},
    "preempted": {"max_batch_total_tokens": 256, "max_total_tokens": 96},
}


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_answers_are_as_recorded(family: str, path: str, device_name: str, tmp_path: Path) -> None:
    if device_name == "cpu":
        pytest.skip("tests/models/test_recorded.py compares there")
    compare(answers(family, tmp_path, device=device_name, **PATHS[path]), json.loads(FILE.read_text())[family])
