#!/usr/bin/env python3
"""Exit status 0 if the server in this container is ready, else 1. Asks /health on the port it was told to take."""

import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path


def find_port(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """As the launcher chooses it: a flag, then what the cloud says, then PORT."""
    for place, argument in enumerate(arguments):
        if argument in ("--port", "-p") and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith("--port="):
            return argument.partition("=")[2]
    if environment.get("AIP_HTTP_PORT"):
        return environment["AIP_HTTP_PORT"]
    if environment.get("HF_MODEL_ID") and not environment.get("MODEL_ID"):
        return "8080"
    return environment.get("PORT") or "3000"


def main(command_line: Path = Path("/proc/1/cmdline")) -> int:
    try:
        arguments = command_line.read_text(errors="replace").split("\0")
        with urllib.request.urlopen(f"http://127.0.0.1:{find_port(os.environ, arguments)}/health", timeout=5) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
