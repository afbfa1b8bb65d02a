"""The programs of other people's clients, and how each is run. Each prints, as JSON, what the server answered."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import install
import pytest

QUESTION = "Say hello in one word."
TOKENS = 12  # of every script's answer to it
SCRIPTS = {path.stem: path for path in (*install.NODE.glob("*.mjs"), *(install.HERE / "python").glob("*.py"))}
WITH_OPENAI_3 = (
    "anthropic_stack",
    "langchain_openai_stack",
    "llama_index_tgi",
    "openai_agents_responses_stack",
    "openai_agents_stack",
    "openai_responses_stack",
    "pydantic_ai_stack",
)
SETTINGS = {"HAYSTACK_TELEMETRY_ENABLED": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
TOGETHER = 3  # scripts at once: most of their time goes into imports and into waiting for tokens
LIMIT_S = 240


class NotInstalled(Exception):
    """Why a script cannot run."""


def skip_or_fail(error: NotInstalled, environment: Mapping[str, str]) -> NoReturn:
    """A machine without a network skips these tests. CI has one, and nothing is left out there unseen."""
    if environment.get("CI") == "true":
        raise error
    pytest.skip(str(error))


def command_of(script: Path) -> list[str]:
    """The program and its arguments; none where there is no node."""
    if script.suffix == ".mjs":
        program, state = shutil.which("node"), install.node_state()
        options = []
    else:
        name = "openai3" if script.stem in WITH_OPENAI_3 else "openai2"
        program, state = install.ENVIRONMENTS / name / "bin" / "python", install.python_state(name)
        options = ["-I"]  # nothing of this project: one of the clients' packages is called `tgi` as well
    if program is not None and not install.is_ready(state):
        raise NotInstalled("not installed as the lock file says (python tests/clients/install.py)")
    return [str(program), *options, str(script)] if program else []
