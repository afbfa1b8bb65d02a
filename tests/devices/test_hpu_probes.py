"""The programs behind the open questions of docs/gaudi.md run, here on the stand-in, so that they will where a card is."""

import json

import pytest
from gaudi import run_with_stand_in
from hpu_questions import FROM_SUITE, QUESTIONS

ALL = """
import hpu_probes, json
bridge = hpu_probes.load_bridge()
print(json.dumps({number: probe(bridge) for number, probe in hpu_probes.PROBES.items()}))
"""


def test_every_question_is_asked(device_name: str) -> None:
    if device_name != "cpu":
        pytest.skip("make test-hpu asks the card")
    answers = json.loads(run_with_stand_in(ALL, PT_HPU_LAZY_MODE="1").splitlines()[-1])
    assert {int(number) for number in answers} == set(QUESTIONS) - set(FROM_SUITE)
    assert "'TotalNumber': 0" in answers["2"]
    assert " graph" in answers["3"] and "2 prompts of 128 tokens: " in answers["3"]
    assert "(256.0, nan)" in answers["7"], "the stand-in plays Gaudi 2"
    assert answers["9"].endswith("as on the CPU: True")
    assert answers["17"] == "not timed"
