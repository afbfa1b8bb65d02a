"""Four times the load that a server can bear: how much of its peak does it still deliver?

    python bench/overload.py [--seconds 60] [--factor 4] [--json FILE]

The launcher as a user starts it, on the embedded model: 64 tokens in and out. First as many clients as run at a
time, each asking again when it has its answer: the peak. Then requests arrive at random (Poisson) at `factor` times the
peak's rate, whatever becomes of them; those refused with status 429 are gone. Goodput counts tokens of whole
answers, in the second half of each phase.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "api"))

import httpx2 as httpx
from serving import Server
from traffic import client_of

NUM_IN, NUM_OUT = 64, 64
AT_A_TIME = 64


def body(chance: random.Random) -> dict:
    prompt = [chance.randrange(100, 40_000) for _ in range(NUM_IN)]
    return {"prompt": prompt, "max_tokens": NUM_OUT, "temperature": 0, "ignore_eos": True}


class Count:
    """Answers of a phase. Those of its first half, in which queues fill, do not count."""

    def __init__(self, seconds: float) -> None:
        self.begin = time.perf_counter()
        self._half_s = seconds / 2
        self.answers: dict[int, int] = {}
        self.seconds: list[float] = []
        self._num_counted = 0

    @property
    def over(self) -> bool:
        return time.perf_counter() - self.begin >= 2 * self._half_s

    @property
    def per_second(self) -> float:
        return self._num_counted / self._half_s

    async def ask(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        begin = time.perf_counter()
        response = await client.post("/v1/completions", json=body(chance))
        self.answers[response.status_code] = self.answers.get(response.status_code, 0) + 1
        if response.status_code == 200:
            end = time.perf_counter()
            self.seconds.append(end - begin)
            self._num_counted += self._half_s <= end - self.begin < 2 * self._half_s


async def find_peak(client: httpx.AsyncClient, seconds: float) -> Count:
    """As many clients as are computed at a time, each asking again when it has its answer."""
    chance, count = random.Random(1), Count(seconds)

    async def keep_asking() -> None:
        while not count.over:
            await count.ask(client, chance)

    await asyncio.gather(*(keep_asking() for _ in range(AT_A_TIME)))
    return count


async def overload(client: httpx.AsyncClient, seconds: float, rate: float) -> Count:
    """Requests arrive at that rate, whatever becomes of them."""
    chance, count = random.Random(2), Count(seconds)
    tasks: set[asyncio.Task[None]] = set()
    arrival = count.begin
    while not count.over:
        tasks.add(asyncio.create_task(count.ask(client, chance)))
        arrival += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
    await asyncio.gather(*tasks)
    return count


async def measure(url: str, seconds: float, factor: float) -> dict:
    async with client_of(url) as client:
        alone = await find_peak(client, seconds)
        beyond = await overload(client, seconds, factor * alone.per_second)
    return {
        "peak_tokens_s": alone.per_second * NUM_OUT,
        "overload_tokens_s": beyond.per_second * NUM_OUT,
        "share": beyond.per_second / alone.per_second,
        "answers": beyond.answers,
        "median_s_at_peak": sorted(alone.seconds)[len(alone.seconds) // 2],
        "median_s_overloaded": sorted(beyond.seconds)[len(beyond.seconds) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of each phase (%(default)s)")
    parser.add_argument("--factor", type=float, default=4, help="times the peak's rate (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = Server("--max-total-tokens", "1024", "--no-prefix-caching")
    try:
        found = asyncio.run(measure(server.url, options.seconds, options.factor))
    finally:
        server.stop()
    print(f"peak {found['peak_tokens_s']:.0f} tokens/s, answers take {found['median_s_at_peak']:.2f} s")
    print(
        f"at {options.factor:g} times its rate {found['overload_tokens_s']:.0f} tokens/s, {found['share']:.0%} of it;"
        f" answers take {found['median_s_overloaded']:.2f} s; by status: {found['answers']}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
