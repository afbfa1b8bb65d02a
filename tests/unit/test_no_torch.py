"""What the front end and the scheduler import must work where torch is not installed."""

import subprocess
import sys

import pytest

MODULES = [
    "text_generation_inference.errors",
    "text_generation_inference.types",
    "text_generation_inference.config",
    "text_generation_inference.text.model_folder",
    "text_generation_inference.text.tokenizer",
    "text_generation_inference.text.detokenize",
    "text_generation_inference.text.stopping",
    "text_generation_inference.text.chat_template",
    "text_generation_inference.text.output",
    "text_generation_inference.text.prepare",
    "text_generation_inference.text.grammar",
    "text_generation_inference.text.tools",
    "text_generation_inference.scheduler.blocks",
    "text_generation_inference.scheduler.scheduler",
    "text_generation_inference.engine.client",
    "text_generation_inference.pictures.loader",
    "text_generation_inference.pictures.worker",
    "text_generation_inference.api.process",
    "text_generation_inference.launch.supervisor",
    "text_generation_inference.launch.command",
    "text_generation_inference.launch.arguments",
    "text_generation_inference.launch.server_command",
    "text_generation_inference.bench.page.command",
    "text_generation_inference.bench.serve.command",
    "text_generation_inference.bench.static.command",
    "text_generation_inference.bench.static.screen",
    "text_generation_inference.cli",
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
