"""What a streamed token costs in each chat API: chat completions, Messages, Responses, by turns in one run.

    python bench/chat_apis.py [--streams 128] [--tokens 300] [--rounds 5] [--rate 10000]

An engine double speaks the real protocol to one real api process; clients read real sockets. Told is the processor time
of the api process for a token, at a pace that leaves most tokens alone in their write, and as fast as it can.
"""

import argparse
import json
import mmap
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from front_end import DOUBLE, Run, cpu_seconds, listener

from text_generation_inference.api.control import EngineReady, Start
from text_generation_inference.config import ServerConfig, cache_folder
from text_generation_inference.weights.source import resolve_model

HELLO = [{"role": "user", "content": "Hi"}]


def bodies(tokens: int) -> dict[str, tuple[str, bytes]]:
    asked = {
        "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": tokens}),
        "messages": ("/v1/messages", {"model": "m", "messages": HELLO, "max_tokens": tokens}),
        "responses": ("/v1/responses", {"input": HELLO, "max_output_tokens": tokens, "store": False}),
    }
    return {name: (path, json.dumps({**body, "stream": True}).encode()) for name, (path, body) in asked.items()}


def measure(port: int, pid: int, options: argparse.Namespace, times: mmap.mmap) -> dict[str, dict[str, list[float]]]:
    """Microseconds per token, by pace and API; the order of APIs turns with each round."""
    asked = bodies(options.tokens)
    for path, body in asked.values():
        struct.pack_into("d", times, 0, -1.0)
        Run(port, path, body, options.streams, options.tokens, None)  # warm-up
    found: dict[str, dict[str, list[float]]] = {pace: {name: [] for name in asked} for pace in ("paced", "fast")}
    names = list(asked)
    for turn in range(options.rounds):
        for pace, costs in found.items():
            struct.pack_into("d", times, 0, options.streams / options.rate if pace == "paced" else -1.0)
            for name in names[turn % 3 :] + names[: turn % 3]:
                before = cpu_seconds(pid)
                run = Run(port, *asked[name], options.streams, options.tokens, None)
                assert run.events >= options.streams * options.tokens * 0.9, "tokens without text are few"
                costs[name].append(1e6 * (cpu_seconds(pid) - before) / (options.streams * options.tokens))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=10_000.0, help="tokens per second where they are paced")
    options = parser.parse_args()
    folder = resolve_model("embedded", cache_folder(ServerConfig())).path
    with tempfile.TemporaryDirectory(prefix="tgi-bench-") as scratch:
        times_path = Path(scratch) / "times"
        times_path.write_bytes(bytes(8 * (options.tokens + 2)))
        with times_path.open("r+b") as file:
            times = mmap.mmap(file.fileno(), 0)
        engine_socket = f"{scratch}/engine.sock"
        double = subprocess.Popen(
            [sys.executable, str(DOUBLE), engine_socket, str(folder), str(times_path), str(options.streams)],
            stdout=subprocess.PIPE,
        )
        assert double.stdout is not None
        double.stdout.readline()
        sock = listener()
        command = [sys.executable, "-m", "text_generation_inference.api.process"]
        api = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[sock.fileno()])
        assert api.stdin is not None and api.stdout is not None
        config = ServerConfig(max_concurrent_requests=100_000, log_level="error")
        for message in (Start(config, sock.fileno()), EngineReady(engine_socket)):
            api.stdin.write(msgspec.json.encode(message) + b"\n")
        api.stdin.flush()
        api.stdout.readline()
        try:
            found = measure(sock.getsockname()[1], api.pid, options, times)
        finally:
            for process in (api, double):
                process.kill()
                process.wait()
    print(f"{options.streams} streams x {options.tokens} tokens, medians of {options.rounds} rounds; us per token")
    for pace, costs in found.items():
        base = costs["chat"]
        for name, values in costs.items():
            ratios = [value / before for value, before in zip(values, base, strict=True)]
            print(f"{pace:>6} {name:>10} {statistics.median(values):6.2f}   {statistics.median(ratios):.2f}x chat")


if __name__ == "__main__":
    main()
