#!/usr/bin/env python3
"""Print the section of requirements.lock that the program runs with, hashes included: what images install.

With --without-torch, less torch and what only torch needs: an image for Gaudi has its own.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SECTION = "# -- "  # the first is what the program runs with
OF_TORCH = ("mpmath", "networkx", "sympy", "torch")


def packages(lock: str) -> Iterator[tuple[str, str]]:
    """Name and lines of each package of the first section."""
    section = lock.split(SECTION)[1].partition("\n")[2]
    for block in re.split(r"\n(?=\S)", section.strip()):
        if not block.startswith("#"):
            yield block.partition("==")[0], block


def main(arguments: list[str]) -> None:
    left_out = OF_TORCH if "--without-torch" in arguments else ()
    for name, block in packages(Path("requirements.lock").read_text()):
        if name not in left_out:
            print(block)


if __name__ == "__main__":
    main(sys.argv[1:])
