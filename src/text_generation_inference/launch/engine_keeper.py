"""One engine that is kept running: started, told of, started again when it ends; others go on meanwhile.

An engine that cannot start at all ends the launcher, also one of several: that is a mistake to be seen at once. One
that was ready and then fails again and again ends it too, unless another one serves: then it is tried for ever.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from text_generation_inference.api.control import EngineLost, EngineReady, Restarts
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.heartbeat import heartbeat_path
from text_generation_inference.engine.status import EXIT_START_FAILED, EngineStarted, FromEngineProcess, Stage
from text_generation_inference.launch.child import Child
from text_generation_inference.launch.start_stages import StartStages

log = logging.getLogger("text_generation_inference.launch")

EXIT_MODEL, EXIT_ENGINE = 3, 4
_decode_engine = msgspec.json.Decoder(FromEngineProcess).decode


@dataclass
class EngineSurroundings:
    """What keepers ask of the launcher, and what they share."""

    folder: Path
    stopping: asyncio.Event
    restarts: Restarts
    stages: StartStages
    listen: Callable[[], bool]  # the first engine is ready; False: that cannot be
    send: Callable[[EngineReady | EngineLost], None]
    give_up: Callable[[int], None]
    pause_after: "PauseAfter"


class PauseAfter(Protocol):
    async def __call__(self, child: Child, reason: str, started: float, status: int, forever: bool) -> bool:
        """Count a failure and wait a while. False: there were too many, or the launcher stops."""
        ...


class EngineKeeper:
    def __init__(
        self, number: int, config: ServerConfig, environment: dict[str, str], around: EngineSurroundings
    ) -> None:
        self.number = number
        self._is_one_of_several = config.num_replicas > 1
        self._config = config
        self._around = around
        self._folder = around.folder
        if self._is_one_of_several:  # an engine's ranks meet in the folder of its socket
            self._folder /= str(number)
            self._folder.mkdir()
        self.child = Child(f"engine {number}" if self._is_one_of_several else "engine", environment)
        self.socket: str | None = None  # of the engine that is ready
        self._ready_at: float | None = None  # when that was
        self.notes: list[str] = []  # how it came up
        self.others: list[EngineKeeper] = []

    async def keep(self) -> None:
        around, child = self._around, self.child
        start = 0
        ever_ready = False
        while not around.stopping.is_set():
            start += 1
            path = str(self._folder / f"engine-{start}.sock")
            self._ready_at = None
            process = await child.start("text_generation_inference.engine", path, stderr=asyncio.subprocess.PIPE)
            if around.stopping.is_set():
                child.send_signal(signal.SIGKILL)
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(msgspec.json.encode(self._config))
            process.stdin.close()
            errors = asyncio.create_task(self._forward_errors(process.stderr))
            async for line in process.stdout:
                match _decode_engine(line):
                    case Stage(name=name, done=done, total=total):
                        around.stages.update(self._label(name), done, total)
                    case EngineStarted() as ready:
                        if ever_ready:
                            around.restarts.engine += 1
                            around.restarts.by_replica[self.number] += 1
                        ever_ready = True
                        self._on_ready(ready, path)
                    case _:
                        pass
            status = await process.wait()
            await errors
            child.stop_watching()
            reason = child.describe_end(status)
            if not child.hang:
                self._lose(reason)  # also while stopping: what is drained must not wait for it
            for left in (Path(path), heartbeat_path(path)):
                left.unlink(missing_ok=True)
            if around.stopping.is_set():
                return
            if not ever_ready:
                words = child.last_words[-1] if child.last_words else reason
                log.error("%s", self._label(words.removeprefix("engine cannot start: ")))
                around.give_up(EXIT_MODEL if status == EXIT_START_FAILED else EXIT_ENGINE)
                return
            if not await self._pause(reason):
                return

    async def _pause(self, reason: str) -> bool:
        started = self._ready_at or time.monotonic()
        forever = any(other.socket is not None for other in self.others)
        return await self._around.pause_after(self.child, reason, started, EXIT_ENGINE, forever)

    def end_hung(self, hang: str) -> None:
        self.child.hang = hang
        self._around.restarts.engine_hangs += 1
        self._lose(f"the {self.child.name} process {hang}")  # at once: it may take its time to die
        self.child.send_signal(signal.SIGKILL)

    def tell(self) -> EngineReady | None:
        """To an api process that has just started."""
        return None if self.socket is None else EngineReady(self.socket, self._around.restarts, self.number)

    def _lose(self, reason: str) -> None:
        self.socket = None
        self._around.send(EngineLost(reason, self._around.restarts, self.number))

    def _on_ready(self, ready: EngineStarted, path: str) -> None:
        around = self._around
        if not around.listen():
            return
        self.child.watch(heartbeat_path(path))
        around.stages.close()
        self.socket = path
        self._ready_at = time.monotonic()
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.seconds.items())
        log.info("%s ready: %s", self.child.name.capitalize(), stages)
        told = [note for other in self.others if other.socket is not None for note in other.notes]
        self.notes = ready.notes
        for note in ready.notes:
            if note not in told:  # most of them are alike
                log.info("%s", self._label(note))
        around.send(EngineReady(path, around.restarts, self.number))

    async def _forward_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            if text:
                self.child.last_words.append(text)
                if not text.startswith("engine cannot start: "):
                    log.warning("%s: %s", self.child.name, text)

    def _label(self, text: str) -> str:
        """Whose words these are, where there are several."""
        return f"{self.child.name}: {text}" if self._is_one_of_several else text
