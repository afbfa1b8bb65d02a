"""Requests as clients send them, several at a time, and what /proc tells about a process."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
from serving import NO_TLS, Server

Event = dict[str, Any]
DONE: Event = {"done": True}  # the event "[DONE]"


def counting(first: int) -> str:
    """A prompt whose greedy answer does not end by itself."""
    return "Count up: " + "".join(f"{first + number}, " for number in range(5)) + f"{first + 5},"


def native(prompt: str, new_tokens: int, **parameters: object) -> tuple[str, Event]:
    return "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens, **parameters}}


def chat(prompt: str, new_tokens: int, **fields: object) -> tuple[str, Event]:
    messages = [{"role": "user", "content": prompt}]
    return "/v1/chat/completions", {
        "messages": messages,
        "max_tokens": new_tokens,
        "stream": True,
        "temperature": 0,
        "logit_bias": {"2": -100},  # the end of a turn: answers are as long as they may
        **fields,
    }


def events_of(lines: list[str]) -> list[Event]:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [DONE if text == "[DONE]" else json.loads(text) for text in data]


async def follow(
    client: httpx.AsyncClient, path: str, body: Event, on_event: Callable[[Event], None] | None = None
) -> list[Event]:
    """All events of a stream, to its end."""
    events: list[Event] = []
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            for event in events_of([line]):
                events.append(event)
                if on_event is not None:
                    on_event(event)
    return events


class Started:
    """Tells when so many streams have had an event."""

    def __init__(self, num_streams: int) -> None:
        self._left = num_streams
        self._all = asyncio.Event()

    def stream(self) -> Callable[[Event], None]:
        seen: list[Event] = []

        def on_event(event: Event) -> None:
            seen.append(event)
            if len(seen) == 2:  # the first of a chat is no token
                self._left -= 1
                if self._left == 0:
                    self._all.set()

        return on_event

    async def wait(self, streams: Sequence["asyncio.Task[Any]"]) -> None:
        """Until then; raises if one of them ends before."""
        waiting = asyncio.create_task(self._all.wait())
        done, _ = await asyncio.wait([waiting, *streams], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert waiting in done, [task.result() for task in done] or "nothing came"


async def start_lasting(client: httpx.AsyncClient) -> tuple[list[asyncio.Task], list[asyncio.Task]]:
    """Four streams, each of which has begun, and two whole answers; all last."""
    started = Started(4)
    streams = [
        asyncio.create_task(follow(client, *(native if n % 2 else chat)(counting(n), 900), started.stream()))
        for n in range(4)
    ]
    whole = [
        asyncio.create_task(client.post("/generate", json=native(counting(8), 900)[1])),
        asyncio.create_task(client.post("/v1/chat/completions", json=chat("Hi", 900, stream=False)[1])),
    ]
    await started.wait(streams)
    return streams, whole


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=120, verify=NO_TLS, limits=httpx.Limits(max_connections=None))


@contextmanager
def running(*arguments: str, **options: Any) -> Iterator[Server]:
    """A server that is not there any more afterwards, however the test ends."""
    server = Server(*arguments, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


# -- processes -----------------------------------------------------------------------------------------------------


def open_files(pid: int) -> list[str]:
    names: list[str] = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return names


def is_gone(pid: int) -> bool:
    """Dead, even if whoever adopted it has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def socket_path(engine_pid: int) -> Path:
    """Where an engine process listens."""
    arguments = Path(f"/proc/{engine_pid}/cmdline").read_bytes().split(b"\0")
    return Path(arguments[arguments.index(b"text_generation_inference.engine") + 1].decode())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is there and does nothing, as if in the middle of very long work."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
