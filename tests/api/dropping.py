"""Clients that leave at any moment, and what a server holds for its clients. For tests, and bench/disconnects.py."""

import asyncio
import json
import os
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path

from serving import Server
from traffic import Event, chat, counting, native

RST_ON_CLOSE = struct.pack("ii", 1, 0)


def encode(path: str, body: Event) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def long_requests() -> list[bytes]:
    """One of each kind, none of which ends soon by itself."""
    path, body = chat(counting(2), 900)
    sampled = {"max_new_tokens": 900, "do_sample": True, "best_of": 2}
    return [
        encode(*native(counting(1), 900)),
        encode("/generate", native(counting(1), 900)[1]),
        encode("/generate", {"inputs": counting(1), "parameters": sampled}),
        encode(path, body),
        encode(path, {**body, "stream": False}),
        encode(path, {**body, "n": 3, "temperature": 1.0}),
        encode("/v1/completions", {"prompt": [counting(3), counting(4)], "max_tokens": 900, "stream": True}),
        encode(*native(counting(5) * 10, 900, top_n_tokens=3)),
    ]


class Books:
    """What the server holds for clients."""

    def __init__(self, server: Server) -> None:
        metrics = server.metrics()
        names = (
            "tgi_kv_blocks_used",
            "tgi_batch_current_size",
            "tgi_queue_size",
            "tgi_queue_tokens",
            "tgi_requests_in_flight",
        )
        self.held = {name: metrics.get(name, 0) for name in names}  # absent until first used
        self.steps = metrics.get('tgi_batch_inference_count{method="decode"}', 0)
        self.dropped = metrics.get('tgi_request_failure{err="dropped"}', 0)
        pid = server.children()["api"]
        self.descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        self.threads = len(os.listdir(f"/proc/{pid}/task"))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.memory = pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def idle(self) -> bool:
        return not any(self.held.values())


async def drop(port: int, request: bytes, chance: random.Random, longest_s: float = 0.3) -> None:
    """Send a request, or the beginning of one, read for a while, and be gone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    is_complete = chance.random() < 0.9
    writer.write(request if is_complete else request[: chance.randrange(len(request))])
    with suppress(TimeoutError):
        async with asyncio.timeout(chance.random() * longest_s):
            while await reader.read(4096):
                pass
    if chance.random() < 0.5:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
    writer.transport.abort()
