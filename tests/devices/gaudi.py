"""Where the stand-in for Intel's software is, and how a test gets it."""

import os
import subprocess
import sys
from pathlib import Path

STAND_IN = Path(__file__).parents[1] / "hpu_emulated"


def use_stand_in() -> None:
    """In this process, in lazy mode."""
    if str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
    os.environ["PT_HPU_LAZY_MODE"] = "1"


def run_with_stand_in(program: str, **environment: str | None) -> str:
    return run_alone("cpu", program, **environment)


def run_alone(device_name: str, program: str, **environment: str | None) -> str:
    """Standard output of a Python program in a process of its own: the mode is read once, and a card serves one process.
    None: that variable is not set.

    `device_name` as tests are given it: `hpu` is whatever Gaudi software this Python has, `cpu` the stand-in.
    """
    here = Path(__file__).parent
    found = [here, here.parent / "models", os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(str(path) for path in (*([STAND_IN] if device_name == "cpu" else []), *found) if str(path))
    surroundings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={name: text for name, text in surroundings.items() if text is not None},
        capture_output=True,
        text=True,
        timeout=300 if device_name == "cpu" else 3600,  # a card compiles
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
