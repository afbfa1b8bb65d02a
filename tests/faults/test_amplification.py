"""A request costs what it asks for: bytes out, processor time and memory of the api process, per route and parameter."""

import httpx2 as httpx
import pytest
from amplifying import Case, cases, measure
from serving import Server

pytestmark = pytest.mark.usefixtures("prompt_event_loop")

# What an answer may hold beside what was generated or sent.
FIXED_BYTES = {"/metrics": 400_000, "/api-doc/openapi.json": 200_000, "/docs": 100_000}
PER_TOKEN, PER_TOP, MORE_TOPS = 700, 160, 8  # a chat chunk with everything; an alternative; ties beyond those asked for
PER_BYTE_IN = 60  # `/tokenize` says id, text, start and stop of a token that may be one character
MOST_CPU_S, MOST_MB = 2.5, 60


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_answers_are_bounded(case: Case, server: Server, http: httpx.Client) -> None:
    cost = measure(server, http, case)
    tops = case.num_tops + MORE_TOPS if case.num_tops else 0
    allowed = FIXED_BYTES.get(case.path, 8_000) + PER_BYTE_IN * cost.bytes_in
    allowed += case.num_tokens * (PER_TOKEN + tops * PER_TOP) * 2  # best_of and n hold several
    assert cost.bytes_out <= allowed, cost
    assert cost.api_cpu_s <= MOST_CPU_S, cost
    assert cost.api_growth_mb <= MOST_MB, cost
    assert cost.status in (200, 400, 422, 424), cost  # 424: a mask took more than a step may, and only this one failed
