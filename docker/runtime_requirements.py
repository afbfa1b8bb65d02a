#!/usr/bin/env python3
"""Print what the program needs to run, without torch: an image for Gaudi has one of its own.

With a file name, the lines of that lock file without torch and Triton instead: limits for what pip chooses.
"""

import re
import sys
import tomllib
from pathlib import Path

OWN = ("torch", "triton")


def name_of(line: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0].lower()


def main(arguments: list[str]) -> None:
    if arguments:
        lines = Path(arguments[0]).read_text().splitlines()
    else:
        project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        lines = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    print("\n".join(line for line in lines if name_of(line) not in OWN))


if __name__ == "__main__":
    main(sys.argv[1:])
