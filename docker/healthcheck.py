#!/usr/bin/env python3
"""Exit status 0 if the server in this container is ready, else 1. Asks /health where it was told to listen."""

import ipaddress
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path


def find_flag(arguments: Sequence[str], *names: str) -> str | None:
    """The last value of a flag, which is the one that counts."""
    found = None
    for place, argument in enumerate(arguments):
        if argument in names and place + 1 < len(arguments):
            found = arguments[place + 1]
        elif argument.partition("=")[0] in names and "=" in argument:
            found = argument.partition("=")[2]
    return found


def find_port(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """As the launcher chooses it: a flag, then what the cloud says, then PORT."""
    port = find_flag(arguments, "--port", "-p")
    if port is not None:
        return port
    if environment.get("AIP_HTTP_PORT"):
        return environment["AIP_HTTP_PORT"]
    if environment.get("HF_MODEL_ID") and not environment.get("MODEL_ID"):
        return "8080"
    return environment.get("PORT") or "3000"


def find_host(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """The address it listens on; what is no address (a container's HOSTNAME is a name) stands for all of them."""
    text = find_flag(arguments, "--hostname") or environment.get("HOSTNAME", "")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "127.0.0.1"
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return text if address.version == 4 else f"[{text}]"


def main(command_line: Path = Path("/proc/1/cmdline")) -> int:
    try:
        arguments = command_line.read_text(errors="replace").split("\0")
        place = f"{find_host(os.environ, arguments)}:{find_port(os.environ, arguments)}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach this container
        with direct.open(f"http://{place}/health", timeout=5) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
