"""What the front end and the scheduler import must work where torch is not installed."""

import subprocess
import sys

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

# None in sys.modules makes every import of that name fail. All in one process: each is asked for in its turn.
PROGRAM = """
import importlib, sys
sys.modules["torch"] = sys.modules["transformers"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
"""


def imported(*modules: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM, *modules]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)


def test_imports_without_torch() -> None:
    done = imported(*MODULES)
    assert done.returncode == 0, done.stderr


def test_the_block_works() -> None:
    assert "runner.runner: import of torch halted" in imported("text_generation_inference.runner.runner").stderr
