"""Connections dropped at random moments under load: does the server return to where it started?

    python bench/disconnects.py [--drops 1000] [--at-a-time 32] [--json FILE]

The launcher as a user starts it, on the embedded model. Clients of every kind of request leave within three seconds,
some before their request is complete, half of them with a reset; two streams stay and must bring the same tokens as
alone. What the server holds is read when nothing runs any more: at the start, after a tenth of the drops, after all.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))

from dropping import Books, drop, long_requests
from serving import Server
from traffic import client_of, counting, follow, native

STAYING = native(counting(7), 60)


class Run:
    """Drops, beside streams that stay."""

    def __init__(self, server: Server, at_a_time: int) -> None:
        self._server, self._at_a_time = server, at_a_time
        self._chance = random.Random(1)
        self.expected: list[int] = []
        self.num_stayed = self.num_wrong = 0
        self.most: dict[str, float] = {}

    async def drop(self, count: int) -> None:
        gate = asyncio.Semaphore(self._at_a_time)
        kinds = long_requests()

        async def one() -> None:
            async with gate:
                await drop(self._server.port, self._chance.choice(kinds), self._chance, longest_s=3.0)

        async with client_of(self._server.url) as client:
            if not self.expected:
                self.expected = token_ids(await follow(client, *STAYING))
            dropping = asyncio.gather(*(one() for _ in range(count)))

            async def stay() -> None:
                while not dropping.done():
                    self.num_stayed += 1
                    self.num_wrong += token_ids(await follow(client, *STAYING)) != self.expected

            async def look() -> None:
                while not dropping.done():
                    seen = await asyncio.to_thread(row_of, self._server)
                    self.most = {name: max(value, self.most.get(name, 0)) for name, value in seen.items()}
                    await asyncio.sleep(0.2)

            await asyncio.gather(dropping, stay(), stay(), look())


def token_ids(events: list) -> list[int]:
    return [event["token"]["id"] for event in events]


def row_of(server: Server) -> dict[str, float]:
    books = Books(server)
    return {
        "KV blocks held": books.held["tgi_kv_blocks_used"],
        "requests in flight": books.held["tgi_requests_in_flight"],
        "requests queued": books.held["tgi_queue_size"],
        "file descriptors, api": books.descriptors,
        "threads, api": books.threads,
        "resident MB, api": books.memory / 1e6,
        "dropped so far": books.dropped,
    }


def when_idle(server: Server) -> dict[str, float]:
    server.wait_for(lambda: Books(server).idle, "the end of all work", 120)
    time.sleep(1)  # connections that are closing
    return row_of(server)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drops", type=int, default=1000)
    parser.add_argument("--at-a-time", type=int, default=32)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    server = Server("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    try:
        run = Run(server, options.at_a_time)
        columns = {"start": when_idle(server)}
        first = options.drops // 10
        begin = time.perf_counter()
        for name, count in (("after a tenth", first), ("after all", options.drops - first)):
            asyncio.run(run.drop(count))
            columns[name] = when_idle(server)
        seconds = time.perf_counter() - begin
        columns["most, under load"] = run.most
    finally:
        status = server.stop()
    print(f"{options.drops} drops, {options.at_a_time} at a time, in {seconds:.0f} s; exit status {status}")
    print(f"streams that stayed: {run.num_stayed}, with other tokens than alone: {run.num_wrong}\n")
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in columns["start"]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns.values()) + " |")
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "columns": columns}, indent=1))
    held = ("KV blocks held", "requests in flight", "requests queued")
    clean = all(columns["after all"][name] == 0 for name in held)
    same = columns["after all"]["file descriptors, api"] <= columns["after a tenth"]["file descriptors, api"]
    return 0 if clean and same and not run.num_wrong and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
