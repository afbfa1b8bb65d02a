"""Starts the engine and the api process, keeps them running, and ends them in order.

The launcher holds the address from the first moment, so a port that is taken is found at once, and listens
when the model is ready; the api process takes the connections. A process that dies is started again, later each time; a
model that cannot start at all ends the launcher. When the launcher dies, however that happens, the kernel ends both
processes. One that lives but hangs is killed, and so started again like one that died.
"""

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from text_generation_inference.api.control import EngineLost, EngineReady, Restarts, Start
from text_generation_inference.api.logs import fields
from text_generation_inference.config import ServerConfig, child_environment
from text_generation_inference.engine.heartbeat import Watch, heartbeat_path
from text_generation_inference.engine.status import EXIT_START_FAILED, EngineStarted, FromEngineProcess, Stage
from text_generation_inference.errors import StartError
from text_generation_inference.launch.hangs import find_hang
from text_generation_inference.launch.private_folder import PrivateFolder
from text_generation_inference.progress import StageBars

log = logging.getLogger("text_generation_inference.launch")

EXIT_MODEL, EXIT_ENGINE, EXIT_API, EXIT_PORT = 3, 4, 5, 6
_MAX_FAILURES = 6  # in a row
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_GOOD_RUN_S = 60.0  # a process that lived this long had no failure in a row
_TELL_EVERY_S = 10.0
_KILL_AFTER_S = 10.0  # beyond the time to drain
_LOOK_EVERY_S = 0.25
_BACKLOG = 2048  # connections that nobody has taken yet
_decode_engine = msgspec.json.Decoder(FromEngineProcess).decode


def serve(config: ServerConfig) -> int:
    """Serve until told to stop. The exit status: 0, or one of EXIT_*."""
    try:
        listener = open_port(config)
    except StartError as error:
        log.error("%s", error)
        return EXIT_PORT
    return asyncio.run(Supervisor(config, listener).run())


def open_port(config: ServerConfig) -> socket.socket:
    """Take the address without listening yet: connections are refused until the engine is ready."""
    host = ipaddress.ip_address(config.hostname)
    family = socket.AF_INET6 if host.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((str(host), config.port))
    except OSError as error:
        listener.close()
        raise StartError(describe_port(config.port, error)) from None
    listener.set_inheritable(True)
    return listener


def describe_port(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} is in use by another program. Choose another with `--port N` or PORT=N"
    return f"Cannot listen on port {port}: {error.strerror}"


class _Child:
    """A process that is kept running: what it wrote last, and how often it failed in a row."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self._environment = environment
        self.process: asyncio.subprocess.Process | None = None
        self.last_words: deque[str] = deque(maxlen=20)
        self.failures = 0
        self.hang = ""  # why the launcher ended it
        self._watch: Watch | None = None

    async def start(self, module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        self.last_words.clear()
        self.hang = ""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**22,
            env=self._environment,
            start_new_session=True,  # Ctrl-C, or a signal to the launcher's group, is the launcher's to act upon
            **options,
        )
        return self.process

    def watch(self, heartbeat: Path) -> None:
        """From now on a hang is seen."""
        self.stop_watching()
        self._watch = Watch(heartbeat)

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def find_hang(self) -> str | None:
        if self._watch is None or self.process is None or self.process.returncode is not None or self.hang:
            return None
        return find_hang(self._watch, self.process.pid)

    def send_signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def stop(self, number: signal.Signals, patience_s: float) -> None:
        """End it with a signal, or SIGKILL if that takes too long."""
        if self.process is None or self.process.returncode is not None:
            return
        self.send_signal(number)
        try:
            await asyncio.wait_for(self.process.wait(), patience_s)
        except TimeoutError:
            log.error("The %s process did not end in time: killed", self.name)
            self.send_signal(signal.SIGKILL)
            await self.process.wait()

    def describe_end(self, status: int) -> str:
        if self.hang:
            return f"the {self.name} process {self.hang}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        return f"the {self.name} process {how}"  # clients are told: what it said last is in the log alone

    def pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self.failures - 1))


class _Stages:
    """Shows how far the start is: bars on a terminal, else a line when a stage begins and now and then after that."""

    def __init__(self, bars: bool) -> None:
        self._bars = StageBars() if bars else None
        self._told: dict[str, float] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        if self._bars is not None:
            self._bars.update(stage, done, total)
            return
        now = time.monotonic()
        if now - self._told.get(stage, -_TELL_EVERY_S) >= _TELL_EVERY_S:
            self._told[stage] = now
            log.info("%s%s", stage, f": {100 * done // total}%" if total and done else " ...")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.__exit__(None, None, None)
            self._bars = StageBars()  # for the next engine


class Supervisor:
    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._address: tuple[str, int] = listener.getsockname()[:2]
        environment = child_environment(config)
        self._engine = _Child("engine", environment)
        self._api = _Child("api", environment)
        self._engine_socket: str | None = None  # of the engine that is ready
        self._ready_at: float | None = None  # when that was
        self._restarts = Restarts()
        self._stopping = asyncio.Event()
        self._caught: list[signal.Signals] = []  # signals with a handler of ours
        self._status = 0
        self._started = time.monotonic()
        self._serving = False
        self._stages = _Stages(bars=sys.stderr.isatty() and not config.json_output)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # else: under nohup
                loop.add_signal_handler(number, self._on_signal, number)
                self._caught.append(number)
        self._private = PrivateFolder()
        self._folder = self._private.path
        tasks = [asyncio.create_task(self._keep_engine()), asyncio.create_task(self._keep_api())]
        stopping = asyncio.create_task(self._stopping.wait())
        watching = asyncio.create_task(self._watch_children())
        try:
            await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            self._listener.close()  # nobody listens any more once the api process has closed its own
            # Requests that run need the engine until they are drained.
            await self._api.stop(signal.SIGTERM, self._config.graceful_termination_timeout + _KILL_AFTER_S)
            await self._engine.stop(signal.SIGKILL, _KILL_AFTER_S)  # it has nothing to tidy up
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    log.error("The launcher failed", exc_info=result)
                    self._status = self._status or 1
        finally:
            stopping.cancel()
            watching.cancel()
            self._stages.close()
            self._private.remove()
            self._listener.close()
        if self._status == 0:
            log.info("Stopped")
        for number in self._caught:  # one more of them must not change the exit status now
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        return self._status

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            log.warning("Second signal: ending at once")
            for child in (self._api, self._engine):
                child.send_signal(signal.SIGKILL)
            self._private.remove()
            logging.shutdown()  # what is said reaches its reader before the end
            os._exit(128 + number)
        log.info("%s: stopping; a second one ends at once", signal.Signals(number).name)
        self._stopping.set()

    async def _watch_children(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for child in (self._engine, self._api):
                if child is self._api and self._stopping.is_set():
                    continue  # it is given time to end, and no more than that
                hang = child.find_hang()
                if hang is not None:
                    self._end_hung(child, hang)

    def _end_hung(self, child: _Child, hang: str) -> None:
        child.hang = hang
        log.error("The %s process %s: killed", child.name, hang)
        if child is self._engine:
            self._restarts.engine_hangs += 1
            self._lose_engine(f"the engine process {hang}")  # at once: it may take its time to die
        else:
            self._restarts.api_hangs += 1
        child.send_signal(signal.SIGKILL)

    def _give_up(self, status: int) -> None:
        self._status = status
        self._stopping.set()

    # -- the engine ------------------------------------------------------------------------------------------------

    async def _keep_engine(self) -> None:
        number = 0
        ever_ready = False
        while not self._stopping.is_set():
            number += 1
            path = str(self._folder / f"engine-{number}.sock")
            self._ready_at = None
            process = await self._engine.start("text_generation_inference.engine", path, stderr=asyncio.subprocess.PIPE)
            if self._stopping.is_set():
                self._engine.send_signal(signal.SIGKILL)
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            process.stdin.write(msgspec.json.encode(self._config))
            process.stdin.close()
            errors = asyncio.create_task(self._forward_errors(process.stderr))
            async for line in process.stdout:
                match _decode_engine(line):
                    case Stage(name=name, done=done, total=total):
                        self._stages.update(name, done, total)
                    case EngineStarted() as ready:
                        self._restarts.engine += ever_ready
                        ever_ready = True
                        self._on_ready(ready, path)
                    case _:
                        pass
            status = await process.wait()
            await errors
            self._engine.stop_watching()
            reason = self._engine.describe_end(status)
            if not self._engine.hang:
                self._lose_engine(reason)  # also while stopping: what is drained must not wait for it
            for left in (Path(path), heartbeat_path(path)):
                left.unlink(missing_ok=True)
            if self._stopping.is_set():
                return
            if not ever_ready:
                words = self._engine.last_words[-1] if self._engine.last_words else reason
                log.error("%s", words.removeprefix("engine cannot start: "))
                self._give_up(EXIT_MODEL if status == EXIT_START_FAILED else EXIT_ENGINE)
                return
            if not await self._pause_after(self._engine, reason, self._ready_at or time.monotonic(), EXIT_ENGINE):
                return

    def _lose_engine(self, reason: str) -> None:
        self._engine_socket = None
        self._send(EngineLost(reason, self._restarts))

    def _on_ready(self, ready: EngineStarted, path: str) -> None:
        if not self._listen():
            return
        self._engine.watch(heartbeat_path(path))
        self._stages.close()
        self._engine_socket = path
        self._ready_at = time.monotonic()
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ready.seconds.items())
        log.info("Engine ready: %s", stages)
        for note in ready.notes:
            log.info("%s", note)
        self._send(EngineReady(path, self._restarts))

    def _listen(self) -> bool:
        """Connections wait from here on until the api process takes them. False if another program was faster."""
        if self._stopping.is_set():
            return False
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            log.error("%s", describe_port(self._address[1], error))
            self._give_up(EXIT_PORT)
            return False
        return True

    async def _forward_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._engine.last_words.append(text)
                if not text.startswith("engine cannot start: "):
                    log.warning("engine: %s", text)

    async def _pause_after(self, child: _Child, reason: str, started: float, status: int) -> bool:
        """Count a failure and wait a while. False if there were too many."""
        child.failures = 1 if time.monotonic() - started > _GOOD_RUN_S else child.failures + 1
        if child.failures >= _MAX_FAILURES:
            log.error("%s, %d times in a row: giving up", reason, child.failures)
            self._give_up(status)
            return False
        log.error("%s", reason, extra=fields(restart_in_s=child.pause_s()))
        try:
            await asyncio.wait_for(self._stopping.wait(), child.pause_s())
        except TimeoutError:
            return True
        return False

    # -- the api ---------------------------------------------------------------------------------------------------

    async def _keep_api(self) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            heartbeat = self._folder / f"api-{number}.beat"
            started = time.monotonic()
            descriptor = self._listener.fileno()
            process = await self._api.start("text_generation_inference.api.process", pass_fds=(descriptor,))
            if self._stopping.is_set():
                self._api.send_signal(signal.SIGTERM)
            self._send(Start(self._config, descriptor, str(heartbeat)))
            if self._engine_socket is not None:
                self._send(EngineReady(self._engine_socket, self._restarts))
            assert process.stdout is not None
            async for _ in process.stdout:  # it has one thing to say: that it serves
                self._api.watch(heartbeat)
                self._on_serving()
            status = await process.wait()
            self._api.stop_watching()
            heartbeat.unlink(missing_ok=True)
            if self._stopping.is_set():
                if status not in (0, -signal.SIGTERM):  # by the signal: it had not got far enough to catch it
                    self._status = self._status or EXIT_API
                return
            reason = self._api.describe_end(status)
            if not self._serving and status > 0:  # it has said why, and would say it again
                log.error("%s", reason)
                self._give_up(EXIT_API)
                return
            if not await self._pause_after(self._api, reason, started, EXIT_API):
                return
            self._restarts.api += 1

    def _on_serving(self) -> None:
        host, port = self._address
        shown = "localhost" if host in ("0.0.0.0", "::") else host
        seconds = time.monotonic() - self._started
        again = " again" if self._serving else f" after {seconds:.1f} s"
        self._serving = True
        log.info(
            "Serving %s on http://%s:%d%s; try http://%s:%d/docs", self._config.model_id, host, port, again, shown, port
        )

    def _send(self, message: Start | EngineReady | EngineLost) -> None:
        process = self._api.process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
