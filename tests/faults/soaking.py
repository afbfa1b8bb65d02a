"""Everything at once: traffic of all kinds, clients that leave, grammars, refusals, and processes that are killed. For
test_soak.py, which takes seconds, and bench/soak.py, which takes as long as you like.

Greedy answers are compared throughout with those from before. First processes are killed, then, for as long as asked,
nobody is; what the processes hold meanwhile is sampled, and its growth per minute is told.
"""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
from dropping import drop, long_requests
from serving import Server
from traffic import chat, client_of, counting, follow, native

_BETWEEN_KILLS_S = 2.0
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 20}}}
GREEDY = [
    native(counting(3), 40),
    native(counting(40), 25, top_n_tokens=3, details=True),
    chat("Say how water boils.", 30),
    native(counting(11) * 12, 10, stop=["23"]),
    ("/v1/completions", {"prompt": counting(5), "max_tokens": 20, "temperature": 0, "stream": True, "logprobs": 2}),
]
REFUSED = [
    ("/generate", {"inputs": "", "parameters": {}}),
    ("/generate", {"inputs": "x", "parameters": {"temperature": -1}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": 5}),
]


def other_traffic(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A request whose answer is not compared."""
    seed = chance.randrange(1 << 30)
    sampled = {"max_new_tokens": chance.randrange(1, 40), "do_sample": True, "seed": seed, "temperature": 0.9}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"inputs": counting(seed % 90), "parameters": {**sampled, "top_p": 0.9, "details": True}}),
        ("/generate", {"inputs": counting(seed % 90), "parameters": {**sampled, "grammar": _grammar(chance)}}),
        ("/v1/chat/completions", {**chat("Hello there", 12)[1], "stream": False, "n": 2, "temperature": 1.0}),
        ("/v1/chat/completions", {**chat("A fact, please", 25)[1], "stream": False, "response_format": _format()}),
        ("/tokenize", {"inputs": counting(seed % 90) * chance.randrange(1, 50)}),
        ("/generate", {"inputs": counting(seed) * chance.randrange(1, 13), "parameters": {"max_new_tokens": 2}}),
    ]
    return chance.choice(kinds)


def _grammar(chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.5:
        return {"type": "regex", "value": f"[a-z]{{1,{chance.randrange(2, 30)}}}"}
    return {
        "type": "json",
        "value": {**SCHEMA, "title": str(chance.randrange(300))},
    }  # many, so that some are forgotten


def _format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@dataclass
class Sample:
    """What a process holds."""

    at_s: float
    memory_mb: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int, at_s: float) -> "Sample":
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return cls(at_s, memory, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


@dataclass
class Soak:
    server: Server
    seconds: float  # after the last kill
    kills: list[str] = field(default_factory=lambda: ["engine", "api", "engine"])
    at_a_time: int = 12
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)  # by status, or the kind of failure
    unexpected: list[str] = field(default_factory=list)
    recoveries_s: list[tuple[str, float]] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    async def run(self) -> None:
        self._killing, self._over = True, False
        async with client_of(self.server.url) as client:
            self._expected = [essence(await follow(client, *request)) for request in GREEDY]
            tasks = [self._until_the_end(self._one_of_any_kind, client) for _ in range(self.at_a_time)]
            tasks += [self._until_the_end(self._leave), self._until_the_end(self._refused, client)]
            await asyncio.gather(*tasks, self._direct(client))

    async def _direct(self, client: httpx.AsyncClient) -> None:
        try:
            await self._kill(client)
            self._killing = False
            await self._sample()
        finally:
            self._over = True

    async def _until_the_end(self, work: Any, *arguments: Any) -> None:
        while not self._over:
            try:
                await work(*arguments)
            except (httpx.HTTPError, OSError) as error:
                self._count(type(error).__name__)
                if not self._killing:
                    self.unexpected.append(repr(error))
                await asyncio.sleep(0.2)

    def _count(self, what: str) -> None:
        self.answers[what] = self.answers.get(what, 0) + 1

    async def _one_of_any_kind(self, client: httpx.AsyncClient) -> None:
        if self.chance.random() < 0.5:
            number = self.chance.randrange(len(GREEDY))
            await self._compare(client, number)
            return
        path, body = other_traffic(self.chance)
        response = await client.post(path, json=body)
        self._count(str(response.status_code))
        if response.status_code != 200 and not self._killing and response.status_code != 429:
            self.unexpected.append(f"{path} {response.status_code} {response.text[:200]}")
        if response.status_code in (429, 503):
            await asyncio.sleep(0.2)

    async def _compare(self, client: httpx.AsyncClient, number: int) -> None:
        killing = self._killing
        try:
            events = await follow(client, *GREEDY[number])
        except AssertionError:  # it was not 200
            self._count("refused")
            if not killing:
                self.unexpected.append(f"{GREEDY[number][0]} was refused")
            await asyncio.sleep(0.2)
            return
        if any("error" in event for event in events):
            self._count("error event")
            if not killing:
                self.unexpected.append(str(events[-1]))
            return
        self.compared += 1
        self._count("200")
        if essence(events) != self._expected[number]:
            self.wrong.append(f"{number}: {essence(events)} for {self._expected[number]}")

    async def _leave(self) -> None:
        await drop(self.server.port, self.chance.choice(long_requests()), self.chance, longest_s=1.0)
        await asyncio.sleep(0.1)

    async def _refused(self, client: httpx.AsyncClient) -> None:
        path, body = self.chance.choice(REFUSED)
        response = await client.post(path, json=body)
        if response.status_code not in (400, 422) and not self._killing:
            self.unexpected.append(f"{path} gave {response.status_code} for what is wrong")
        await asyncio.sleep(0.05)

    async def _kill(self, client: httpx.AsyncClient) -> None:
        """One after the other, each once the server has recovered from the one before."""
        for role in self.kills:
            await asyncio.sleep(_BETWEEN_KILLS_S)
            killed = self.server.children()[role]
            os.kill(killed, signal.SIGKILL)
            begin = time.monotonic()
            while self.server.children().get(role, killed) == killed or not await self._is_healthy(client):
                assert time.monotonic() - begin < 120, f"the {role} process did not come back"
                await asyncio.sleep(0.02)
            self.recoveries_s.append((role, time.monotonic() - begin))
        await asyncio.sleep(_BETWEEN_KILLS_S)  # what ran when it happened has ended by then

    async def _is_healthy(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get("/health", timeout=5)).status_code == 200
        except (httpx.HTTPError, OSError):
            return False

    async def _sample(self) -> None:
        begin = time.monotonic()
        while (elapsed_s := time.monotonic() - begin) < self.seconds:
            pids = {**self.server.children(), "launcher": self.server.process.pid}
            for role, pid in pids.items():
                self.samples.setdefault(role, []).append(Sample.of(pid, elapsed_s))
            await asyncio.sleep(min(1.0, self.seconds / 60))

    def slope_per_minute(self, role: str, what: str) -> float:
        """Of the line through the samples; those of the first third, in which caches fill, do not count."""
        points = [(s.at_s / 60, getattr(s, what)) for s in self.samples[role] if s.at_s > self.seconds / 3]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def essence(events: list[dict[str, Any]]) -> list[Any]:
    """What must be the same each time: tokens, or texts."""
    found: list[Any] = []
    for event in events:
        if "token" in event:
            found.append(event["token"]["id"])
        for choice in event.get("choices", []):
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    texts = [item for item in found if isinstance(item, str)]
    return ["".join(texts)] if texts else found
