"""The api process: HTTP on one side, the engine's socket on the other. Never torch.

Started by the launcher with a listening address as a file descriptor. On standard input come JSON lines: first
`Start`, then what becomes of the engine. The port opens when the first engine is ready. SIGTERM drains: no new
requests, the running ones get the time that `graceful_termination_timeout` allows, then end with an error.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import uvicorn
import uvloop

from text_generation_inference import failpoints
from text_generation_inference.api.app import App
from text_generation_inference.api.connections import Connections, derive_limits, raise_descriptor_limit
from text_generation_inference.api.control import EngineLost, EngineReady, FromLauncher, Restarts, Start
from text_generation_inference.api.http import KEEP_ALIVE_S
from text_generation_inference.api.logs import configure_logging, fields, num_dropped_lines
from text_generation_inference.api.protocol import LimitedProtocol
from text_generation_inference.api.service import Service
from text_generation_inference.api.trace import Tracer
from text_generation_inference.config import failpoints_asked, payload_limit
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.engine.heartbeat import Heartbeat, Watch, heartbeat_path
from text_generation_inference.engine.parent import end_with_parent
from text_generation_inference.engine.wire import max_to_engine
from text_generation_inference.errors import EngineError, TgiError

log = logging.getLogger("text_generation_inference.api")

EXIT_FAILED = 1
_LAST_WORDS_S = 3.0  # for errors to reach the clients once the time to drain is over
_IDLE_CONNECTION_S = 75
_ENGINE_ANSWERS_S = 60.0  # one that is in the middle of a long step answers after it
_DRAIN_POLL_S = 0.05
_LAG_POLL_S = 0.05
_BLOCKED_LIMIT_S = 30.0  # for the event loop
_SILENCE_S = 5.0  # an engine that gives no sign of life for so long gets no requests until it does

_decode = msgspec.json.Decoder(FromLauncher).decode


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling."""

    def capture_signals(self) -> nullcontext[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nullcontext()


class ApiProcess:
    def __init__(self, start: Start, messages: asyncio.StreamReader) -> None:
        self._config = start.config
        self._socket = socket.socket(fileno=start.listen_fd)
        self._messages = messages
        self._service: Service | None = None
        self._http: _HttpServer | None = None
        self._joining: dict[int, EngineClient] = {}  # engines that have not answered yet
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._tracer = Tracer.start(start.config.otlp_endpoint, start.config.otlp_service_name)
        self._stopping = asyncio.Event()
        self._heartbeat: Heartbeat | None = None
        if start.heartbeat:
            limit_s = min(_BLOCKED_LIMIT_S, start.config.step_timeout_s or _BLOCKED_LIMIT_S)
            self._heartbeat = Heartbeat(Path(start.heartbeat), limit_s)
        self._watches: dict[int, Watch] = {}  # of engines

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._stopping.set)
        listener = asyncio.create_task(self._listen_to_launcher())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([listener, stopping], return_when=asyncio.FIRST_COMPLETED)
            if listener.done():
                listener.result()  # raises what went wrong
            if self._failure is not None:
                raise self._failure
        finally:
            stopping.cancel()
            if self._service is not None:
                await self._close(self._service)
            listener.cancel()  # only now: an engine that is lost while requests are drained must end them
            self._tracer.stop()

    async def _listen_to_launcher(self) -> None:
        while line := await self._messages.readline():
            match _decode(line):
                case EngineReady(socket=path, restarts=restarts, replica=replica):
                    attaching = self._attach_or_stop(Path(path), restarts, replica)
                    self._attaching[replica] = asyncio.create_task(attaching)
                case EngineLost(reason=reason, restarts=restarts, replica=replica):
                    if replica in self._joining:
                        self._joining[replica].fail(EngineError(reason))  # it will not answer any more
                    await self._detach(reason, replica)
                    if self._service is not None:
                        self._service.metrics.restarts(restarts)
                case _:  # the start, or what cannot be read
                    pass

    async def _attach_or_stop(self, path: Path, restarts: Restarts, replica: int) -> None:
        try:
            await self._attach(path, restarts, replica)
        except Exception as error:
            self._failure = error
            self._stopping.set()

    async def _attach(self, path: Path, restarts: Restarts, replica: int) -> None:
        client = self._joining[replica] = EngineClient(path, max_to_engine(payload_limit(self._config)))
        try:
            client.on_failure = self._on_client_failure
            facts = await client.connect(_ENGINE_ANSWERS_S)
        except BaseException as error:
            await client.close()  # or this process could not end
            if isinstance(error, EngineError) and client.failure is not None:
                return  # it is lost; the launcher tells when there is another
            raise
        finally:
            if self._joining.get(replica) is client:
                del self._joining[replica]
        self._watch_engine(path, replica)
        service = self._service
        if service is None:
            service = self._service = Service(self._config, facts, self._tracer)
            service.attach(client, facts, replica)
            service.metrics.restarts(restarts)
            await self._open(service)
            return
        was_there = service.engines.links[replica].facts is not None
        service.attach(client, facts, replica)
        service.metrics.restarts(restarts)
        if service.engines.are_several:
            log.info("Engine %d is %s", replica, "back" if was_there else "there")
        else:
            log.info("The engine is back")

    def _watch_engine(self, path: Path, replica: int) -> None:
        self._stop_watching(replica)
        with suppress(OSError):  # it is lost already
            self._watches[replica] = Watch(heartbeat_path(path))

    def _stop_watching(self, replica: int) -> None:
        watch = self._watches.pop(replica, None)
        if watch is not None:
            watch.close()

    def _look_at_engines(self, service: Service) -> None:
        """Whether they give signs of life. What becomes of one that does not is the launcher's to decide."""
        for replica, watch in self._watches.items():
            signs = watch.look()
            service.metrics.heartbeat_age(signs.silent_s, replica)
            client = service.engines.links[replica].client
            if client is not None:
                client.responds = not signs.is_stuck and signs.silent_s <= min(_SILENCE_S, signs.limit_s)
                service.metrics.engine_responds(client.responds, replica)

    def _on_client_failure(self, error: Exception) -> None:
        """The engine's messages cannot be read although it lives: only a new process helps."""
        self._failure = error
        self._stopping.set()

    async def _detach(self, reason: str, replica: int) -> None:
        self._stop_watching(replica)
        if self._service is not None:
            client = self._service.detach(reason, replica)
            if client is not None:
                await client.close()

    async def _open(self, service: Service) -> None:
        """Listen, and tell the launcher."""
        limit, spare = derive_limits(raise_descriptor_limit(), self._config.max_connections)
        log.debug("Limits of connections", extra=fields(connections=limit, spare=spare))
        self._connections = connections = Connections(limit, spare, service.metrics)
        app = App(service)
        config = uvicorn.Config(
            app,
            http=partial(LimitedProtocol, connections),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=_IDLE_CONNECTION_S,
        )
        self._http = _HttpServer(config)
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        self._ticking = asyncio.create_task(self._tick(app, connections))
        while not self._http.started:
            if self._serving.done():
                self._serving.result()  # raises why it cannot listen
            await asyncio.sleep(0.005)
        gc.collect()
        gc.freeze()  # what is there now stays, and need not be looked at again
        print(msgspec.json.encode({"serving": True}).decode(), flush=True)

    async def _tick(self, app: App, connections: Connections) -> None:
        """Looks often, so that whatever holds the event loop up is seen; what is due every second is done then."""
        service = app.service
        next_wake = time.monotonic() + 1
        while True:
            due = time.monotonic() + _LAG_POLL_S
            await asyncio.sleep(_LAG_POLL_S)
            now = time.monotonic()
            service.metrics.loop_lag(max(0.0, now - due))
            if self._heartbeat is not None:
                self._heartbeat.beat()
            self._look_at_engines(service)
            if now >= next_wake:
                next_wake = now + 1
                connections.check_progress()
                service.metrics.dropped_lines(num_dropped_lines())
                app.keep_alive(now, KEEP_ALIVE_S)

    async def _close(self, service: Service) -> None:
        """Drain, then end what is left with an error. Until then the port is open, and who comes is told to go away."""
        assert self._http is not None
        service.draining = True
        self._connections.drain()
        now = asyncio.get_running_loop().time
        end = now() + self._config.graceful_termination_timeout
        if service.num_running:
            limit_s = self._config.graceful_termination_timeout
            log.info("Draining", extra=fields(running=service.num_running, limit_s=limit_s))
        while service.num_running and now() < end:
            await asyncio.sleep(_DRAIN_POLL_S)
        if service.num_running:
            log.warning("The time to drain is over", extra=fields(aborted=service.num_running))
        clients = service.detach_all("the server is shutting down")
        service.live.close()
        self._http.should_exit = True
        # Answers are complete, or end with an error now; whoever reads slowly may take them.
        await asyncio.wait([self._serving], timeout=max(end - now(), _LAST_WORDS_S))
        if not self._serving.done():
            self._http.force_exit = True
            await asyncio.wait([self._serving], timeout=1)
        self._ticking.cancel()
        for client in clients:
            await client.close()
        service.close()


async def _main() -> None:
    messages = asyncio.StreamReader(limit=2**22)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(messages), sys.stdin)
    start = _decode(await messages.readline())
    assert isinstance(start, Start)
    config = start.config
    configure_logging(config.log_level, config.json_output, secrets=[config.api_key] if config.api_key else [])
    await ApiProcess(start, messages).run()


def main() -> int:
    """`python -m text_generation_inference.api.process`."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process in order
    failpoints.configure(failpoints_asked())
    gc.set_threshold(20_000, 20, 50)
    try:
        uvloop.run(_main())
    except TgiError as error:
        log.error("The api process cannot run: %s", error)
        return EXIT_FAILED
    return 0


def run() -> NoReturn:
    status = main()
    logging.shutdown()
    os._exit(status)  # a worker thread that is busy, or hangs, holds nobody up


if __name__ == "__main__":
    run()
