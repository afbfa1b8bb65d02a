"""The front end alone: how many streamed tokens per second one api process can send, and what it adds to latency.

    python bench/front_end.py [--streams 256] [--tokens 400] [--route native|chat]

An engine double speaks the real protocol to a real api process; clients read real sockets. Beside it a bare ASGI app on
the same server library (uvicorn, httptools, uvloop) sends the same bytes, one event at a time, in the same run. Events
that wait for a busy api process leave in one write; `events/write` says how many did.
"""

import argparse
import json
import mmap
import os
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from text_generation_inference.api.control import EngineReady, Start
from text_generation_inference.config import ServerConfig, cache_folder
from text_generation_inference.weights.source import resolve_model

DOUBLE = Path(__file__).with_name("engine_double.py")
BARE = """
import asyncio, os, sys
EVENT, TOKENS = bytes.fromhex(sys.argv[2]), int(sys.argv[3])
async def app(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(TOKENS):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})
import uvicorn
options = {"http": "httptools", "loop": "uvloop", "lifespan": "off", "log_level": "error", "access_log": False}
uvicorn.run(app, fd=int(sys.argv[1]), **options)
"""


def listener() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.set_inheritable(True)
    return sock


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Run:
    """What the clients saw."""

    def __init__(self, port: int, path: str, body: bytes, streams: int, tokens: int, times: mmap.mmap | None) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        selector = selectors.DefaultSelector()
        sockets = []
        for _ in range(streams):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, [0, b""])
            sockets.append(sock)
        for sock in sockets:
            sock.send(head.encode() + body)
        self.events, self.bytes, self.reads, left = 0, 0, 0, streams
        self.latencies: list[float] = []
        first = last = 0.0
        while left:
            for key, _ in selector.select(30):
                sock, state = key.fileobj, key.data
                data = sock.recv(1 << 18)
                now = time.monotonic()
                count = data.count(b"data: ")
                self.reads += 1
                if count:
                    first, last = first or now, now
                    self.events += count
                    self.bytes += len(data)
                    state[0] += count
                    if times is not None and state[0] <= tokens:
                        self.latencies.append(now - struct.unpack_from("d", times, 8 * state[0])[0])
                if not data or data.endswith(b"0\r\n\r\n"):
                    selector.unregister(sock)
                    sock.close()
                    left -= 1
        self.seconds = last - first
        self.rate = self.events / self.seconds


def percentile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--route", choices=("native", "chat"), default="native")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    streams, tokens = options.streams, options.tokens
    folder = resolve_model("embedded", cache_folder(ServerConfig())).path
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as scratch:
        times_path = Path(scratch) / "times"
        times_path.write_bytes(bytes(8 * (tokens + 2)))
        with times_path.open("r+b") as file:
            times = mmap.mmap(file.fileno(), 0)
        engine_socket = f"{scratch}/engine.sock"
        double = subprocess.Popen(
            [sys.executable, str(DOUBLE), engine_socket, str(folder), str(times_path), str(streams)],
            stdout=subprocess.PIPE,
        )
        assert double.stdout is not None
        double.stdout.readline()
        sock = listener()
        api = subprocess.Popen(
            [sys.executable, "-m", "text_generation_inference.api.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[sock.fileno()],
        )
        assert api.stdin is not None and api.stdout is not None
        config = ServerConfig(max_concurrent_requests=100_000, log_level="error")
        for message in (Start(config, sock.fileno()), EngineReady(engine_socket)):
            api.stdin.write(msgspec.json.encode(message) + b"\n")
        api.stdin.flush()
        api.stdout.readline()
        port = sock.getsockname()[1]

        def body(pause_ns: int) -> tuple[str, bytes]:
            if options.route == "chat":
                message = {"role": "user", "content": "Hi"}
                asked = {"messages": [message], "stream": True, "max_tokens": tokens, "seed": pause_ns}
                return "/v1/chat/completions", json.dumps(asked).encode()
            parameters = {"max_new_tokens": tokens, "seed": pause_ns}
            return "/generate_stream", json.dumps({"inputs": "Hi", "parameters": parameters}).encode()

        Run(port, *body(0), streams, tokens, None)  # warm-up
        sample = Run(port, *body(0), streams, tokens, None)
        event = b"data: " + b"x" * (sample.bytes // sample.events - 8) + b"\n\n"
        bare_sock = listener()
        bare_sock.listen(2048)
        bare = subprocess.Popen(
            [sys.executable, "-c", BARE, str(bare_sock.fileno()), event.hex(), str(tokens)],
            pass_fds=[bare_sock.fileno()],
        )
        bare_port = bare_sock.getsockname()[1]
        Run(bare_port, "/", b"{}", streams, tokens, None)
        rows = []
        for _ in range(options.rounds):
            before = cpu_seconds(bare.pid)
            bare_run = Run(bare_port, "/", b"{}", streams, tokens, None)
            bare_cpu = cpu_seconds(bare.pid) - before
            before = cpu_seconds(api.pid)
            ours = Run(port, *body(0), streams, tokens, None)
            ours_cpu = cpu_seconds(api.pid) - before
            half_pause = int(1e9 * streams / (ours.rate / 2))
            before = cpu_seconds(api.pid)
            half = Run(port, *body(half_pause), streams, tokens, times)
            half_cpu = cpu_seconds(api.pid) - before
            rows.append(
                {
                    "bare_tokens_per_s": bare_run.rate,
                    "bare_cpu_us": 1e6 * bare_cpu / bare_run.events,
                    "tokens_per_s": ours.rate,
                    "cpu_us": 1e6 * ours_cpu / ours.events,
                    "events_per_read": ours.events / ours.reads,
                    "ratio": ours.rate / bare_run.rate,
                    "half_rate": half.rate,
                    "half_cpu_us": 1e6 * half_cpu / half.events,
                    "half_events_per_read": half.events / half.reads,
                    "half_p50_ms": 1e3 * percentile(half.latencies, 0.5),
                    "half_p99_ms": 1e3 * percentile(half.latencies, 0.99),
                }
            )
            print(", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True)
        middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        print(f"\n{options.route}, {streams} streams x {tokens} tokens of {len(event)} bytes; medians of {len(rows)}")
        for name, value in middle.items():
            print(f"{name:>22} {value:12,.2f}")
        if options.json:
            Path(options.json).write_text(
                json.dumps({"options": vars(options), "median": middle, "rows": rows}, indent=1)
            )
        for process in (bare, api, double):
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
