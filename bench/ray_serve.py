"""Ray Serve against the plain launcher, one replica: streamed tokens/s, first tokens, what Ray works for a token.

    make test            # once, for .venv-ray; or: .venv/bin/python tests/ray_serve/ray_environment.py
    .venv-ray/bin/python bench/ray_serve.py [--python-proxy]

A replica on Ray is the launcher in a process of its own, so both are measured on the same engine: through Ray's proxy
and ingress, and at the replica's own address, by turns. Streams are of the embedded model, on one thread.
"""

import argparse
import asyncio
import os
import socket
import statistics
import sys
import time
from dataclasses import dataclass

import aiohttp
import psutil

from text_generation_inference.ray_serve.command import prepare_environment
from text_generation_inference.ray_serve.options import RayOptions

VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "OMP_NUM_THREADS": "1",
    "TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN": "true",
}
PROXIES, INGRESS = ("ProxyActor", "bin/haproxy"), "Replica:tgi:Ingress"


@dataclass
class Run:
    tokens_per_s: float
    first_ms: float  # median
    gap_ms: float  # median between two events of a stream
    proxy_ms: float  # of processor, for a token
    ingress_ms: float


async def stream(
    session: aiohttp.ClientSession, url: str, number: int, tokens: int, gaps: list[float]
) -> tuple[float, int]:
    body = {"inputs": f"Story {number}, told at length:", "parameters": {"max_new_tokens": tokens}}
    start = last = time.perf_counter()
    first, count = 0.0, 0
    async with session.post(f"{url}/generate_stream", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data:"):
                now = time.perf_counter()
                if count:
                    gaps.append(now - last)
                else:
                    first = now - start
                count, last = count + 1, now
    assert count == tokens, count
    return first, count


def processor_s(*words: str) -> float:
    """Of the processes whose command has one of these words."""
    total = 0.0
    for process in psutil.process_iter(["cmdline"]):
        if any(word in part for part in process.info["cmdline"] or [] for word in words):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def measure(url: str, streams: int, tokens: int) -> Run:
    gaps: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await stream(session, url, 0, 4, [])
        before = processor_s(*PROXIES), processor_s(INGRESS)
        start = time.perf_counter()
        found = await asyncio.gather(*(stream(session, url, number, tokens, gaps) for number in range(streams)))
        seconds = time.perf_counter() - start
        after = processor_s(*PROXIES), processor_s(INGRESS)
    total = sum(count for _, count in found)
    spent = [1e3 * (then - now) / total for now, then in zip(before, after, strict=True)]
    first = 1e3 * statistics.median(first for first, _ in found)
    return Run(total / seconds, first, 1e3 * statistics.median(gaps), spent[0], spent[1])


def median(runs: list[Run], name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python-proxy", action="store_true", help="Ray's own proxy, not HAProxy")
    given = parser.parse_args()
    os.environ |= VARIABLES
    prepare_environment(RayOptions(), "python" if given.python_proxy else "haproxy")

    import ray  # reads the environment
    from ray import serve

    from text_generation_inference.ray_serve import app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=8, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app({"device": "cpu", "num_threads": 1, "max_batch_total_tokens": 32_768}), name="tgi")
        (replica,) = serve.get_deployment_handle("Replica", "tgi").broadcast("describe").results()
        ways = {"launcher": replica["address"], "Ray": f"http://127.0.0.1:{port}"}
        heads = ("Streams", "Launcher, tokens/s", "Ray", "Ray / launcher", "First token, ms", "Ray", "Gap, ms", "Ray")
        heads += ("Proxy, ms of a core per token", "Ingress")
        print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        for streams in given.streams:
            runs: dict[str, list[Run]] = {way: [] for way in ways}
            for turn in range(given.rounds):
                for way in sorted(ways, reverse=bool(turn % 2)):
                    runs[way].append(asyncio.run(measure(ways[way], streams, given.tokens)))
            plain, through = runs["launcher"], runs["Ray"]
            ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(plain, through, strict=True)]
            cells = [
                f"{streams}",
                f"{median(plain, 'tokens_per_s'):.0f}",
                f"{median(through, 'tokens_per_s'):.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{median(plain, 'first_ms'):.1f}",
                f"{median(through, 'first_ms'):.1f}",
                f"{median(plain, 'gap_ms'):.1f}",
                f"{median(through, 'gap_ms'):.1f}",
                f"{median(through, 'proxy_ms'):.2f}",
                f"{median(through, 'ingress_ms'):.2f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
