"""The whole server over HTTP streaming, beside the offline engine and llama.cpp's server, from one run.

    python bench/server.py [--rounds 9] [--peer-python PYTHON] [--json FILE]

Work as in cpu_engine.py: the embedded model, 64 random tokens in, 128 out, greedy, EOS ignored, at concurrency 1, 4 and
16. Served and offline take turns, batch by batch, both processes alive, so that a slow moment of the machine hits both.
The server is the launcher as a user starts it; one client process reads all streams of `/v1/completions`. Then the time
`/health` takes while 16 streams run, and while 1,500-token prompts are computed.
"""

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from cpu_engine import LEVELS, NUM_OUT, child, prompts


class Server:
    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        arguments = ["--port", str(self.port), "--max-total-tokens", "2048", "--no-prefix-caching"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "text_generation_inference.launch.command", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "Serving" in line:
                break
        else:
            sys.exit("the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def request(method: str, path: str, body: dict | None = None) -> bytes:
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def stream(port: int, batch: list[list[int]], max_tokens: int = NUM_OUT) -> tuple[float, float]:
    """(seconds until all have ended, mean seconds to the first token)."""
    selector = selectors.DefaultSelector()
    started = time.perf_counter()
    firsts: list[float] = []
    for prompt in batch:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request("POST", "/v1/completions", body))
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, [False, b""])
    left = len(batch)
    while left:
        for key, _ in selector.select():
            data, state = key.fileobj.recv(1 << 16), key.data
            state[1] = (state[1] + data)[-64:]
            if not state[0] and b"data: " in data:
                state[0] = True
                firsts.append(time.perf_counter() - started)
            if not data or state[1].endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
    return time.perf_counter() - started, statistics.mean(firsts)


def health_times(port: int, stop: threading.Event) -> list[float]:
    """Seconds of each GET /health on one connection, one every 5 ms."""
    times: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while not stop.is_set():
            started = time.perf_counter()
            sock.sendall(request("GET", "/health"))
            assert b" 200 " in sock.recv(4096)
            times.append(time.perf_counter() - started)
            time.sleep(0.005)
    return times


def health_under(port: int, work) -> dict[str, float]:
    stop = threading.Event()
    times: list[float] = []
    watcher = threading.Thread(target=lambda: times.extend(health_times(port, stop)))
    watcher.start()
    work()
    stop.set()
    watcher.join()
    times.sort()
    return {
        "samples": len(times),
        "p50_ms": 1e3 * times[len(times) // 2],
        "p99_ms": 1e3 * times[int(0.99 * len(times))],
    }


class Offline:
    """The offline engine in a process of its own, which answers one line per batch."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--offline-worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.rate(1, 0)

    def rate(self, level: int, seed: int) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{level} {seed}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def offline_worker() -> None:
    from text_generation_inference import LLM, SamplingParams

    llm = LLM(progress=False, max_total_tokens=2048, prefix_caching=False)
    params = SamplingParams(max_new_tokens=NUM_OUT, ignore_eos=True)
    for line in sys.stdin:
        level, seed = map(int, line.split())
        batch = prompts(level, seed)
        started = time.perf_counter()
        llm.generate(batch, params)
        print(level * NUM_OUT / (time.perf_counter() - started), flush=True)


def alternate(rounds: int) -> tuple[list[dict[str, dict[int, float]]], dict[str, dict[str, float]]]:
    """Offline and served in turn, batch by batch, both processes alive: a slow moment of the machine hits both."""
    server, offline = Server(), Offline()
    stream(server.port, prompts(1, 0))
    rows = []
    for number in range(rounds):
        row: dict[str, dict[int, float]] = {"offline": {}, "served": {}, "first_ms": {}}
        for level in LEVELS:
            seed = 1000 * number + level
            turns = ("offline", "served") if number % 2 else ("served", "offline")
            for turn in turns:
                if turn == "offline":
                    row["offline"][level] = offline.rate(level, seed)
                else:
                    seconds, first = stream(server.port, prompts(level, seed))
                    row["served"][level], row["first_ms"][level] = level * NUM_OUT / seconds, 1e3 * first
        rows.append(row)
        print(f"round {number + 1}: {json.dumps(row)}", file=sys.stderr, flush=True)
    offline.stop()
    seed = 7
    long = [[(7 * n + place) % 40000 + 100 for place in range(1500)] for n in range(4)]
    health = {
        "idle": health_under(server.port, lambda: time.sleep(2)),
        "16 streams": health_under(server.port, lambda: stream(server.port, prompts(16, seed + 99))),
        "1,500-token prompts": health_under(server.port, lambda: [stream(server.port, [p], 1) for p in long]),
    }
    server.stop()
    return rows, health


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--offline-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer-python", help="a Python with xllamacpp and aiohttp")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.offline_worker:
        offline_worker()
        return
    from text_generation_inference.weights.embedded import find_embedded

    rounds, health = alternate(options.rounds)
    if options.peer_python:
        for number, row in enumerate(rounds[:3]):
            arguments = ("--run", "llamacpp", "--seed", str(1000 * number), "--gguf", str(find_embedded()))
            row["llamacpp"] = child(options.peer_python, *arguments)
    peers = ["offline"] + (["llamacpp"] if options.peer_python else [])
    print("| concurrency | served, tok/s | first token, ms |" + "".join(f" {p}, tok/s | served / {p} |" for p in peers))
    print("|---|---|---|" + "---|---|" * len(peers))
    for level in LEVELS:
        cells = [str(level), f"{statistics.median(r['served'][level] for r in rounds):.0f}"]
        cells.append(f"{statistics.median(r['first_ms'][level] for r in rounds):.0f}")
        for peer in peers:
            rows = [r for r in rounds if peer in r]
            ratios = [r["served"][level] / r[peer][level] for r in rows]
            cells.append(f"{statistics.median(r[peer][level] for r in rows):.0f}")
            cells.append(f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})")
        print("| " + " | ".join(cells) + " |")
    print("\n| `/health` while | p50, ms | p99, ms |\n|---|---|---|")
    for name, times in health.items():
        print(f"| {name} | {times['p50_ms']:.2f} | {times['p99_ms']:.2f} |")
    if options.json:
        Path(options.json).write_text(json.dumps({"rounds": rounds, "health": health}, indent=1))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
