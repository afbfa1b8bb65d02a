"""Seconds from each kind of death or hang to an error for clients, to red and to green.

    python bench/recovery.py [--limit 5] [--only kill-engine,stop-engine]

A server of the embedded model under four streams; each harm happens to a server of its own. `error`: the last stream
ended with an error or a broken connection; `red`: `/health` is not 200 (or nobody answers within half a second);
`green`: a new request has its right greedy answer. `--limit` is the server's `--step-timeout-s`, which bounds what a
hang may take to be seen; the device's own is longer.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx2 as httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "api"))
from serving import Server
from traffic import client_of, counting, follow, native

PROMPT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 12}}
HARMS = {
    "kill-engine": ("engine", signal.SIGKILL, "kill -9 of the engine"),
    "stop-engine": ("engine", signal.SIGSTOP, "SIGSTOP of the engine"),
    "hung-step": ("", "engine.compute=hang", "a step that never ends"),
    "hung-loop": ("", "engine.plan=hang", "the engine's loop hangs"),
    "raise-plan": ("", "engine.plan=raise", "an exception in planning"),
    "raise-apply": ("", "engine.apply=raise", "an exception in taking a result"),
    "no-memory": ("", "engine.compute=memory", "every step lacks memory"),
    "kill-api": ("api", signal.SIGKILL, "kill -9 of the api process"),
    "stop-api": ("api", signal.SIGSTOP, "SIGSTOP of the api process"),
    "hung-api": ("", "api.deliver=hang", "the api process's loop hangs"),
}


class Run:
    """One harm to one server: when things were first seen, in seconds after it."""

    def __init__(self, server: Server, faults: Path) -> None:
        self.server, self._faults = server, faults
        self.error_s = self.red_s = self.green_s = float("nan")

    async def measure(self, role: str, harm: str | int) -> None:
        async with client_of(self.server.url) as client:
            expected = (await client.post("/generate", json=PROMPT)).json()
            first = asyncio.Event()
            streams = [
                asyncio.create_task(follow(client, *native(counting(n), 900), lambda _: first.set())) for n in range(4)
            ]
            await first.wait()
            self._begin = time.monotonic()
            if isinstance(harm, str):
                self._faults.write_text(harm)
            else:
                os.kill(self.server.children()[role], harm)
            watching = asyncio.create_task(self._watch_health())
            await asyncio.wait(streams, timeout=120)
            self.error_s = time.monotonic() - self._begin
            self._faults.write_text("")
            await asyncio.gather(*streams, return_exceptions=True)
        await self._wait_for_green(expected)
        watching.cancel()

    async def _watch_health(self) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=0.5) as client:
            while True:
                try:
                    red = (await client.get("/health")).status_code != 200
                except httpx.HTTPError:
                    red = True
                if red:
                    self.red_s = time.monotonic() - self._begin
                    return
                await asyncio.sleep(0.02)

    async def _wait_for_green(self, expected: object) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=2) as client:
            while time.monotonic() < self._begin + 120:
                try:
                    answer = await client.post("/generate", json=PROMPT)
                    if answer.status_code == 200:
                        assert answer.json() == expected
                        self.green_s = time.monotonic() - self._begin
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=5.0)
    parser.add_argument("--only", default=",".join(HARMS))
    options = parser.parse_args()
    print(f"| --step-timeout-s {options.limit:g} | error, s | red, s | green, s |\n|---|---|---|---|", flush=True)
    sizes = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    for name in options.only.split(","):
        role, harm, words = HARMS[name]
        with tempfile.TemporaryDirectory() as folder:
            faults = Path(folder) / "faults"
            faults.touch()
            limit = ("--step-timeout-s", str(options.limit))
            server = Server(*sizes, *limit, TGI_FAILPOINTS=f"@{faults}")
            run = Run(server, faults)
            try:
                asyncio.run(run.measure(role, harm))
            finally:
                server.stop()
        print(f"| {words} | {run.error_s:.2f} | {run.red_s:.2f} | {run.green_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
