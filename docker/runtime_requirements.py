#!/usr/bin/env python3
"""Print the section of requirements.lock that the program runs with, hashes included: what images install.

With --without-torch, less torch with NumPy, which it is built for, and what only torch needs: an image for Gaudi has
its own. With --for-tests, more what the device suite needs: nothing of it replaces a torch or NumPy that is there.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SECTION = "# -- "  # the first is what the program runs with
OF_TORCH = ("mpmath", "networkx", "numpy", "sympy", "torch")
FOR_TESTS = (
    "annotated-doc",
    "annotated-types",
    "attrs",
    "hypothesis",
    "iniconfig",
    "pluggy",
    "pydantic",
    "pydantic-core",
    "pytest",
    "pytest-timeout",
    "regex",
    "sortedcontainers",
    "transformers",
    "typer",
    "typing-inspection",
    "shellingham",
)


def packages(lock: str, number: int = 1) -> Iterator[tuple[str, str]]:
    """Name and lines of each package of a section."""
    section = lock.split(SECTION)[number].partition("\n")[2]
    for block in re.split(r"\n(?=\S)", section.strip()):
        if not block.startswith("#"):
            yield block.partition("==")[0], block


def main(arguments: list[str]) -> None:
    left_out = OF_TORCH if "--without-torch" in arguments else ()
    lock = (Path(__file__).parents[1] / "requirements.lock").read_text()
    for name, block in packages(lock):
        if name not in left_out:
            print(block)
    for name, block in packages(lock, 2) if "--for-tests" in arguments else ():
        if name in FOR_TESTS:
            print(block)


if __name__ == "__main__":
    main(sys.argv[1:])
