#!/usr/bin/env python3
"""Exit status 0 if the torch that is installed needs CUDA's libraries beside it (requirements-cuda.lock), else 1."""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

needed = [Requirement(line) for line in requires("torch") or []]
here = [found.name for found in needed if found.marker is None or found.marker.evaluate({"extra": ""})]
sys.exit(0 if any(name.startswith(("cuda-", "nvidia-")) for name in here) else 1)
