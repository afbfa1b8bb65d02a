"""Runs the scripts of the chosen tests beside the tests' server."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripts import LIMIT_S, QUESTION, SCRIPTS, SETTINGS, TOGETHER, TOKENS, NotInstalled, command_of, skip_or_fail
from serving import Server


@pytest.fixture(scope="session")
def runs(server: Server, request: pytest.FixtureRequest) -> Iterator[dict[str, Future]]:
    """Every script whose test was chosen, started ahead of it, a few at a time."""
    left_out = ("PYTHON", "OPENAI", "HF_")
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    surroundings |= {**SETTINGS, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def run(script: Path) -> subprocess.CompletedProcess | None:
        if not (command := command_of(script)):
            return None
        return subprocess.run(
            [*command, server.url, QUESTION], env=surroundings, capture_output=True, text=True, timeout=LIMIT_S
        )

    wanted = [item.name.removeprefix("test_") for item in request.session.items]
    pool = ThreadPoolExecutor(TOGETHER)
    yield {name: pool.submit(run, SCRIPTS[name]) for name in wanted if name in SCRIPTS}
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def said(runs: dict[str, Future], request: pytest.FixtureRequest) -> Any:
    """What the script of this test's name printed last."""
    try:
        done = runs[request.node.name.removeprefix("test_")].result()
    except NotInstalled as error:
        skip_or_fail(error, os.environ)
    if done is None:
        pytest.skip("node is not installed")
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def greedy(server: Server) -> str:
    """The server's answer to a plain request with the settings of every script."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": TOKENS}
    with server.client() as http:
        text = (
            http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]["content"]
        )
    assert len(text.split()) > 3
    return text
