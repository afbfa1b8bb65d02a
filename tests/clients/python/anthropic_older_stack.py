"""anthropic before version 1, which sends its key as `X-Api-Key`: the same as with the newer one."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("anthropic_stack.py")), run_name="__main__")
