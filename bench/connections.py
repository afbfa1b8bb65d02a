"""How soon `/health` is answered, each time on a new connection, while others hold theirs.

    python bench/connections.py [--probes 1000] [--max-connections 728]

The launcher as a user starts it, on the embedded model. 728 connections are what 1,024 descriptors allow. Half bodies:
the head of a request and ten bytes of the 100,000 it announces. Idle ones say nothing.
"""

import argparse
import resource
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))

from serving import Server

HALF = (
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    + b"{" * 10
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def probe(port: int) -> tuple[float, bool]:
    start, data = time.perf_counter(), b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(HEALTH)
        while piece := sock.recv(4096):
            data += piece
    return 1e3 * (time.perf_counter() - start), data.startswith(b"HTTP/1.1 200 ")


def row(server: Server, kind: str, num_held: int, what: bytes, num_probes: int) -> str:
    with ExitStack() as held:
        for _ in range(num_held):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            if what:
                sock.sendall(what)
        results = [probe(server.port) for _ in range(num_probes)]
    times = sorted(taken for taken, _ in results)
    parts = [f"{times[min(len(times) - 1, int(len(times) * share))]:.1f}" for share in (0.5, 0.99, 0.999, 1)]
    return f"| {kind} | {sum(not good for _, good in results)} of {num_probes} | {' | '.join(parts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--max-connections", type=int, default=728)
    asked = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = Server("--max-total-tokens", "512", "--max-connections", str(asked.max_connections))
    try:
        print(
            "| held by others | not answered | p50, ms | p99, ms | p99.9, ms | worst, ms |\n|---|---|---|---|---|---|"
        )
        for kind, count, what in (
            ("nothing", 0, b""),
            ("1,300 half bodies", 1300, HALF),
            ("2,000 idle connections", 2000, b""),
        ):
            print(row(server, kind, count, what, asked.probes), flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
