"""What the front end and the scheduler import must work where torch is not installed."""

import subprocess
import sys

import pytest

MODULES = [
    "tgi.errors",
    "tgi.types",
    "tgi.config",
    "tgi.text.model_folder",
    "tgi.text.tokenizer",
    "tgi.text.detokenize",
    "tgi.text.stopping",
    "tgi.text.chat_template",
    "tgi.text.output",
    "tgi.text.prepare",
    "tgi.text.grammar",
    "tgi.text.tools",
    "tgi.scheduler.blocks",
    "tgi.scheduler.scheduler",
    "tgi.engine.client",
    "tgi.api.process",
    "tgi.launch.supervisor",
    "tgi.launch.command",
    "tgi.launch.arguments",
    "tgi.launch.server_command",
    "tgi.bench.page.command",
    "tgi.bench.serve.command",
    "tgi.bench.static.command",
    "tgi.bench.static.screen",
    "tgi.cli",
]

# None in sys.modules makes every import of that name fail.
PROGRAM = """
import sys
sys.modules["torch"] = None
sys.modules["transformers"] = None
import {module}
"""


@pytest.mark.parametrize("module", MODULES)
def test_imports_without_torch(module: str) -> None:
    program = PROGRAM.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_block_works() -> None:
    program = PROGRAM.format(module="torch")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
