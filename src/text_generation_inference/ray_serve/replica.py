"""A replica: an actor that runs the launcher with the cards Ray gave it, and tells Ray how it is.

Requests do not pass through here: the ingress talks to the api process, whose address is the replica's metadata. The
launcher starts engine and api process again by itself; only one that has ended, or does not answer at all, makes the
replica unhealthy. While its engine starts again it says so, and gets no requests.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

import aiohttp
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]

from text_generation_inference.ray_serve import autoscaling, metrics_text
from text_generation_inference.ray_serve.options import CANNOT_START

_LOOK_EVERY_S = 0.1
_ASK_S = 10.0
_FRESH_S = 0.5  # what was asked so recently is not asked again
_LAST_WORDS = 20
_QUEUED, _RUNNING, _IN_FLIGHT = "tgi_queue_tokens", "tgi_batch_current_size", "tgi_requests_in_flight"
_KV_USED, _KV_TOTAL, _KV_BLOCK = "tgi_kv_blocks_used", "tgi_kv_blocks_total", "tgi_kv_block_tokens"
_ASKED: tuple[str, ...] = (_QUEUED, _RUNNING, _IN_FLIGHT, _KV_USED, _KV_TOTAL, _KV_BLOCK)


class ReplicaServer:
    """Each public method without an underscore is called by Ray."""

    async def __init__(self, arguments: list[str], stop_s: float) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        self._stop_s = stop_s
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._asked_at = 0.0
        self._values: dict[str, float] = dict.fromkeys(_ASKED, 0.0)
        self._ready = False
        host = ray.util.get_node_ip_address()
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, 0))
        shown = f"[{host}]" if ":" in host else host
        self._address = f"http://{shown}:{listener.getsockname()[1]}"
        descriptor = listener.fileno()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "text_generation_inference.ray_serve.launcher_process",
            str(descriptor),
            *arguments,
            pass_fds=(descriptor,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2**22,
        )
        listener.close()
        self._relaying = asyncio.create_task(self._relay())
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S))
        try:
            self._info = await self._wait_until_ready()
            self._capacity_tokens = await self._ask_capacity()
        except BaseException:
            await self._end()
            raise

    async def _relay(self) -> None:
        """What the launcher says goes where Ray keeps what its actors say."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._last_words.append(text)
            print(text, flush=True)

    async def _wait_until_ready(self) -> dict[str, Any]:
        while True:
            if self._process.returncode is not None:
                await self._relaying
                words = next((text for text in reversed(self._last_words) if text), "")
                raise RuntimeError(f"{CANNOT_START} (status {self._process.returncode}): {words}")
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(f"{self._address}/health") as response:
                    if response.status == 200:
                        break
            await asyncio.sleep(_LOOK_EVERY_S)
        async with self._session.get(f"{self._address}/info") as response:
            return await response.json()

    async def _ask_capacity(self) -> int:
        values = await self._ask()
        return int(values[_KV_TOTAL] * values[_KV_BLOCK])

    # -- what Ray asks -----------------------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        """Known to routers from the moment the replica is."""
        return {"address": self._address, "capacity_tokens": self._capacity_tokens}

    async def check_health(self) -> None:
        if self._process.returncode is not None:
            raise RuntimeError(f"the server has ended with status {self._process.returncode}")
        async with self._session.get(f"{self._address}/health") as response:
            self._ready = response.status == 200

    async def record_routing_stats(self) -> dict[str, float]:
        values = await self._ask()
        return {
            "ready": float(self._ready),
            "queued_tokens": values[_QUEUED],
            "running": values[_RUNNING],
            "kv_usage": _kv_usage(values),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        values = await self._ask()
        of_requests = values[_IN_FLIGHT] / self._info["max_concurrent_requests"]
        return {
            autoscaling.QUEUED_TOKENS: values[_QUEUED],
            autoscaling.USAGE: min(1.0, max(_kv_usage(values), of_requests)),
        }

    async def _ask(self) -> dict[str, float]:
        now = time.monotonic()
        if now - self._asked_at > _FRESH_S:
            self._asked_at = now
            try:
                async with self._session.get(f"{self._address}/metrics") as response:
                    self._values = metrics_text.sums(await response.text(), _ASKED)
                async with self._session.get(f"{self._address}/health") as response:
                    self._ready = response.status == 200
            except (aiohttp.ClientError, TimeoutError):
                self._ready = False
        return self._values

    def describe(self) -> dict[str, Any]:
        """Where it runs and with what."""
        name = serve.get_replica_context().replica_id.unique_id
        return {"name": name, "pid": os.getpid(), "launcher": self._process.pid, "address": self._address}

    # -- the end -----------------------------------------------------------------------------------------------------

    async def __del__(self) -> None:  # Ray calls it once requests are drained
        if hasattr(self, "_session"):
            await self._end()

    async def _end(self) -> None:
        await self._session.close()
        if self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), self._stop_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _kv_usage(values: dict[str, float]) -> float:
    return values[_KV_USED] / values[_KV_TOTAL] if values[_KV_TOTAL] else 0.0
