"""What the dashboard costs: processor time of both processes while nobody watches, one does, and several do.

    python bench/dashboard.py [--rounds 3] [--seconds 15]

The launcher as a user starts it, on the embedded model. Phases take turns, idle ones and ones under the same work:
so many requests begin each second, whether those before have ended or not. Watchers read the stream of events as the
page does, from this process.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))

import aiohttp
from serving import Server

WATCHERS = (0, 1, 4)
REQUESTS_PER_S = 2
BODY = {"inputs": "Count up: 3, 4, 5, 6,", "parameters": {"max_new_tokens": 40}}


def processor_s(pid: int) -> float:
    """Of all threads, by the scheduler's own clock."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def watch(client: aiohttp.ClientSession) -> int:
    num_bytes = 0
    try:
        async with client.get("/dashboard/events") as answer:
            async for piece in answer.content.iter_any():
                num_bytes += len(piece)
    except asyncio.CancelledError:
        pass
    return num_bytes


async def work(client: aiohttp.ClientSession, seconds: float) -> None:
    async def one() -> None:
        async with client.post("/generate", json=BODY) as answer:
            assert answer.status == 200
            await answer.read()

    requests: list[asyncio.Task[None]] = []
    for _ in range(round(seconds * REQUESTS_PER_S)):
        requests.append(asyncio.create_task(one()))
        await asyncio.sleep(1 / REQUESTS_PER_S)
    await asyncio.gather(*requests)


async def phase(server: Server, watchers: int, busy: bool, seconds: float) -> tuple[float, float, float]:
    """Processor time of (api, engine) for a second, and bytes for a second and watcher."""
    pids = server.children()
    async with aiohttp.ClientSession(server.url) as client:
        watching = [asyncio.create_task(watch(client)) for _ in range(watchers)]
        await asyncio.sleep(1)  # what opening takes is not what staying open takes
        before, start = {role: processor_s(pid) for role, pid in pids.items()}, time.perf_counter()
        await (work(client, seconds) if busy else asyncio.sleep(seconds))
        passed = time.perf_counter() - start
        used = {role: (processor_s(pid) - before[role]) / passed for role, pid in pids.items()}
        for task in watching:
            task.cancel()
        num_bytes = await asyncio.gather(*watching)
    await asyncio.sleep(0.5)
    return used["api"], used["engine"], sum(num_bytes) / (passed + 1) / max(watchers, 1)


async def measure(server: Server, rounds: int, seconds: float) -> None:
    await phase(server, 1, True, 3)
    found: dict[tuple[bool, int], list[tuple[float, float, float]]] = {}
    for number in range(rounds):
        for busy in (False, True):
            for watchers in WATCHERS if number % 2 == 0 else reversed(WATCHERS):
                found.setdefault((busy, watchers), []).append(await phase(server, watchers, busy, seconds))
    print(f"processor time, ms for each second; medians of {rounds} phases of {seconds:g} s (least to most)")
    print("| | watchers | api process | engine | bytes for a second |\n|---|---|---|---|---|")
    for (busy, watchers), values in sorted(found.items()):
        cells = []
        for place in (0, 1):
            column = sorted(1000 * value[place] for value in values)
            cells.append(f"{statistics.median(column):.2f} ({column[0]:.2f} to {column[-1]:.2f})")
        sent = f"{statistics.median(value[2] for value in values):,.0f}" if watchers else ""
        what = f"{REQUESTS_PER_S} requests a second" if busy else "idle"
        print(f"| {what} | {watchers} | {cells[0]} | {cells[1]} | {sent} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    server = Server("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    try:
        asyncio.run(measure(server, options.rounds, options.seconds))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
