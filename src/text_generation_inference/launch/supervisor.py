"""Starts the engine, or several, and the api process, keeps them running, and ends them in order.

The launcher holds the address from the first moment, so a port that is taken is found at once, and listens
when a first engine is ready; the api process takes the connections. A process that dies is started again, later each
time; a model that cannot start at all ends the launcher. When the launcher dies, however that happens, the kernel ends
its processes. One that lives but hangs is killed, and so started again like one that died.
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

import msgspec

from text_generation_inference.api.control import EngineLost, EngineReady, Restarts, Start
from text_generation_inference.api.logs import fields
from text_generation_inference.config import ServerConfig, child_environment
from text_generation_inference.devices.shares import share_cards
from text_generation_inference.errors import StartError
from text_generation_inference.launch.child import MAX_FAILURES, Child
from text_generation_inference.launch.engine_keeper import EngineKeeper, EngineSurroundings
from text_generation_inference.launch.start_stages import StartStages
from text_generation_inference.pictures.folder import make_picture_folder
from text_generation_inference.private_folder import PrivateFolder

log = logging.getLogger("text_generation_inference.launch")

EXIT_API, EXIT_PORT = 5, 6
_KILL_AFTER_S = 10.0  # beyond the time to drain
_LOOK_EVERY_S = 0.25
_BACKLOG = 2048  # connections that nobody has taken yet


def serve(config: ServerConfig, listener: socket.socket | None = None) -> int:
    """Serve until told to stop; the exit status: 0, or one of EXIT_*. `listener`: an address that is bound already."""
    try:
        listener = listener or open_port(config)
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


class Supervisor:
    def __init__(self, config: ServerConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self._api = Child("api", child_environment(config))
        self._engines: list[EngineKeeper] = []
        self._restarts = Restarts(by_replica=[0] * config.num_replicas)
        self._stopping = asyncio.Event()
        self._caught: list[signal.Signals] = []  # signals with a handler of ours
        self._status = 0
        self._started = time.monotonic()
        self._serving = False
        bars = sys.stderr.isatty() and not config.json_output and config.num_replicas == 1
        self._stages = StartStages(bars)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # else: under nohup
                loop.add_signal_handler(number, self._on_signal, number)
                self._caught.append(number)
        self._private, self._pictures = PrivateFolder(), make_picture_folder()
        self._config = msgspec.structs.replace(self._config, picture_folder=str(self._pictures.path))
        self._engines = self._make_engines()
        tasks = [asyncio.create_task(work) for work in (*(engine.keep() for engine in self._engines), self._keep_api())]
        stopping = asyncio.create_task(self._stopping.wait())
        watching = asyncio.create_task(self._watch_children())
        try:
            await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            self._listener.close()  # nobody listens any more once the api process has closed its own
            # Requests that run need the engine until they are drained.
            await self._api.stop(signal.SIGTERM, self._config.graceful_termination_timeout + _KILL_AFTER_S)
            for engine in self._engines:
                await engine.child.stop(signal.SIGKILL, _KILL_AFTER_S)  # it has nothing to tidy up
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
            self._pictures.remove()
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
            for child in (self._api, *(engine.child for engine in self._engines)):
                child.send_signal(signal.SIGKILL)
            self._private.remove()
            self._pictures.remove()
            logging.shutdown()  # what is said reaches its reader before the end
            os._exit(128 + number)
        log.info("%s: stopping; a second one ends at once", signal.Signals(number).name)
        self._stopping.set()

    async def _watch_children(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for engine in self._engines:
                hang = engine.child.find_hang()
                if hang is not None:
                    log.error("The %s process %s: killed", engine.child.name, hang)
                    engine.end_hung(hang)
            if self._stopping.is_set():
                continue  # the api process is given time to end, and no more than that
            hang = self._api.find_hang()
            if hang is not None:
                log.error("The %s process %s: killed", self._api.name, hang)
                self._api.hang = hang
                self._restarts.api_hangs += 1
                self._api.send_signal(signal.SIGKILL)

    def _give_up(self, status: int) -> None:
        self._status = status
        self._stopping.set()

    # -- the engines -----------------------------------------------------------------------------------------------

    def _make_engines(self) -> list[EngineKeeper]:
        around = EngineSurroundings(
            self._private.path,
            self._stopping,
            self._restarts,
            self._stages,
            self._listen,
            self._send,
            self._give_up,
            self._pause_after,
        )
        environment = child_environment(self._config)
        engines = [
            EngineKeeper(number, self._config, environment | variables, around)
            for number, variables in enumerate(share_cards(self._config, environment))
        ]
        for engine in engines:
            engine.others = [other for other in engines if other is not engine]
        return engines

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

    async def _pause_after(self, child: Child, reason: str, started: float, status: int, forever: bool = False) -> bool:
        """Count a failure and wait a while. False if there were too many, unless it is tried `forever`."""
        child.fail(started)
        if child.failures >= MAX_FAILURES and not forever:
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
            heartbeat = self._private.path / f"api-{number}.beat"
            started = time.monotonic()
            descriptor = self._listener.fileno()
            process = await self._api.start("text_generation_inference.api.process", pass_fds=(descriptor,))
            if self._stopping.is_set():
                self._api.send_signal(signal.SIGTERM)
            self._send(Start(self._config, descriptor, str(heartbeat)))
            for engine in self._engines:
                ready = engine.tell()
                if ready is not None:
                    self._send(ready)
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
            "Serving %s on http://%s:%d%s; chat at http://%s:%d/chat, try all routes at http://%s:%d/docs",
            *(self._config.model_id, host, port, again, shown, port, shown, port),
        )

    def _send(self, message: Start | EngineReady | EngineLost) -> None:
        process = self._api.process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
