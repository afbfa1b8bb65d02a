"""The engine as a process of its own: requests in, tokens out, over a unix socket.

Speaks msgpack structs of `types` over ZeroMQ; one message per step and client carries all its tokens. Several
clients may connect; ids are the client's own. What a client asked for ends when its process is gone. The process ends
when its parent does.
"""

import io
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NoReturn, TextIO

import msgspec
import zmq

from text_generation_inference import failpoints
from text_generation_inference.collection import resume_collection
from text_generation_inference.config import ServerConfig, failpoints_asked, payload_limit
from text_generation_inference.engine import wire
from text_generation_inference.engine.build import Engine, start_engine
from text_generation_inference.engine.heartbeat import Heartbeat, heartbeat_path
from text_generation_inference.engine.outbox import ClientLink
from text_generation_inference.engine.profile import Profiling
from text_generation_inference.engine.ranks import NAMING_S
from text_generation_inference.engine.status import (
    EXIT_ENGINE_FAILED,
    EXIT_START_FAILED,
    EngineStarted,
    FromEngineProcess,
    Stage,
)
from text_generation_inference.engine.warm_up import warm_up
from text_generation_inference.errors import EngineError, TgiError, ValidationError
from text_generation_inference.failpoints import failpoint
from text_generation_inference.quant.inc.measure import Recorder
from text_generation_inference.text.grammar import CompiledGrammar, is_plain
from text_generation_inference.types import (
    Abort,
    Admitted,
    DeviceMemory,
    EngineFailed,
    EngineLoad,
    Finish,
    FromEngine,
    GenerationRequest,
    Grammar,
    Hello,
    Profile,
    Ready,
    StepStats,
    Submit,
    ToEngine,
    TokenOut,
    TopTokens,
)

_CLIENT_SHIFT = 48  # an engine-wide id is the client's number and its own id, which is below `wire.MAX_ID`
_MESSAGES_PER_TURN = 1_000  # between two steps, whoever sends more
_FULL = "the api process did not take the tokens in time"
_SECONDS_BETWEEN_CHECKS = 0.5
_SECONDS_BETWEEN_LOOKS = 5.0  # at the memory of the device
_COMPILING_POLL_MS = 2
_BEHIND_POLL_MS = 10


class EngineServer:
    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        profiling: Profiling | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._engine = engine
        self._heartbeat = heartbeat
        self._profiling = profiling or Profiling(ServerConfig())
        self._loop = engine.loop
        self._socket = socket
        self._clients: dict[bytes, ClientLink] = {}
        self._numbers = count(1)  # of clients
        self._next_check = self._next_look = 0.0
        self._memory: DeviceMemory | None = None
        self._last_load: EngineLoad | None = None
        self._waiting_tokens = self._running_limit = 0  # as of the last check
        self._routed_ns = self._filter_ns = 0
        self._rollbacks = 0
        self._num_malformed = 0
        self._told_malformed = 0.0  # when
        # Grammars are compiled beside the loop: nobody else waits for them, nor do those that take milliseconds for
        # those that may take seconds.
        self._compilers = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="tgi-grammar") for _ in range(2)]
        self._grammars: dict[int, CompiledGrammar] = {}  # of requests in the engine, so that the runner finds them
        self._compiling: dict[int, tuple[ClientLink, GenerationRequest, Future[CompiledGrammar]]] = {}  # by their ids

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Serve until told to stop. Raises `EngineError` when the device fails; clients are told first."""
        while not stopped():
            if self._heartbeat is not None:
                self._heartbeat.turn()
            self._receive()
            self._check_clients()
            if self._compiling:
                self._add_compiled()
            try:
                if not self._loop.has_work:
                    self._engine.rank.check()
                    continue
                out = self._loop.step()
            except EngineError as error:
                last = self._loop.last
                self._tell_all(EngineFailed(str(error), last.failed and last.prefill))
                raise
            self._tell_rollbacks()
            self._tell_news()
            if self._engine.recorder is not None:
                self._save_measured(self._engine.recorder)
            if out is not None:
                self._route(out)
                self._filter_ns = time.monotonic_ns() - self._routed_ns
                if self._profiling.is_on:
                    self._pause_watch()  # it may write a large file
                    self._profiling.step()

    def _pause_watch(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.pause()

    def _save_measured(self, recorder: Recorder) -> None:
        """An engine that measures writes what it has when nothing is left to do, before anybody hears of that."""
        if not (recorder.is_due or (recorder.has_news and not self._loop.has_work)):
            return
        self._pause_watch()
        try:
            recorder.save()
        except TgiError as error:
            print(error, file=sys.stderr, flush=True)

    def _tell_rollbacks(self) -> None:
        count = self._loop.scheduler.stats.num_rollbacks
        if count > self._rollbacks:
            self._rollbacks = count
            text = "a step did not fit the device's memory; its requests are computed again in smaller steps"
            print(f"{text} ({count} since the start)", file=sys.stderr, flush=True)

    def _tell_news(self) -> None:
        for text in self._engine.rank.take_news():
            print(text, file=sys.stderr, flush=True)

    def _receive(self) -> None:
        """Take all messages that are there; without work wait for one, a while."""
        wait_ms = _COMPILING_POLL_MS if self._compiling else int(_SECONDS_BETWEEN_CHECKS * 1000)
        if any(client.is_behind for client in self._clients.values()):
            wait_ms = min(wait_ms, _BEHIND_POLL_MS)
        if self._loop.has_work:
            wait_ms = 0
        for _ in range(_MESSAGES_PER_TURN):
            if not self._socket.poll(wait_ms):
                break
            wait_ms = 0
            address, *frames = self._socket.recv_multipart()
            failpoint("engine.receive")
            try:
                message = wire.decode_to_engine(b"".join(frames))
            except wire.MalformedMessageError as error:
                self._drop(frames, error)
            else:
                self._handle(address, message)

    def _drop(self, frames: list[bytes], error: wire.MalformedMessageError) -> None:
        """A message that means nothing. Said at most once in a while: whoever sends one may send many."""
        self._num_malformed += 1
        now = time.monotonic()
        if now >= self._told_malformed + _SECONDS_BETWEEN_CHECKS:
            self._told_malformed = now
            size, count = sum(map(len, frames)), self._num_malformed
            text = f"a malformed message of {size} bytes was dropped ({count} since the start): {error}"
            print(text[:300], file=sys.stderr, flush=True)

    def _handle(self, address: bytes, message: ToEngine) -> None:
        match message:
            case Hello(pid=pid):
                client = self._clients.get(address)
                if client is None:
                    client = self._clients[address] = ClientLink(self._socket, address, next(self._numbers), pid)
                self._send(client, Ready(self._engine.facts))
            case Submit(request=request):
                client = self._clients.get(address)
                if client is not None:  # else these are the last words of a client that is dead
                    self._submit(client, request)
            case Profile() as profile:
                client = self._clients.get(address)
                if client is not None:
                    self._pause_watch()
                    self._send(client, self._profiling.handle(profile))
            case Abort(request_id=request_id):
                client = self._clients.get(address)
                if client is not None:
                    self._forget(client, client.number << _CLIENT_SHIFT | request_id)

    def _submit(self, client: ClientLink, request: GenerationRequest) -> None:
        engine_id = client.number << _CLIENT_SHIFT | request.id
        if engine_id in client.requests:
            return  # twice the same: the first one goes on
        request = msgspec.structs.replace(request, id=engine_id)
        client.requests.add(engine_id)
        try:
            wire.check_submitted(request, self._engine.facts)
        except ValidationError as error:
            self._refuse(client, engine_id, str(error), "refused")
            return
        if client.is_full:
            self._refuse(client, engine_id, _FULL)
            return
        if request.grammar is not None:
            lane = self._compilers[is_plain(request.grammar.kind, request.grammar.value)]
            compiled = lane.submit(self._compile, request.grammar)
            self._compiling[engine_id] = (client, request, compiled)
        else:
            self._add(client, request)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """Clients have compiled it themselves, and so found it harmless, before they sent it."""
        failpoint("engine.compile")
        return self._engine.compile_grammar(grammar, tried=True)

    def _add_compiled(self) -> None:
        for engine_id, (client, request, compiled) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[engine_id]
                error = compiled.exception()
                if error is None:
                    self._grammars[engine_id] = compiled.result()
                    self._add(client, request)
                else:
                    self._refuse(client, engine_id, str(error))

    def _add(self, client: ClientLink, request: GenerationRequest) -> None:
        try:
            self._loop.add(request)
        except ValidationError as error:  # what can never run, by limits that are known here alone
            self._refuse(client, request.id, str(error), "refused")

    def _refuse(self, client: ClientLink, engine_id: int, text: str, reason: str = "error") -> None:
        self._end(client, engine_id)
        own_id = engine_id - (client.number << _CLIENT_SHIFT)
        self._send(client, TokenOut(finished=[Finish(own_id, reason, text, 0, 0, 0)]))

    def _end(self, client: ClientLink, engine_id: int) -> None:
        client.requests.discard(engine_id)
        self._grammars.pop(engine_id, None)

    def _forget(self, client: ClientLink, engine_id: int) -> None:
        self._loop.abort(engine_id)
        self._end(client, engine_id)
        compiling = self._compiling.pop(engine_id, None)
        if compiling is not None:
            compiling[2].cancel()

    def _route(self, out: TokenOut) -> None:
        """Hand each client the tokens of its own requests, with its own ids."""
        self._routed_ns = time.monotonic_ns()
        stats = self._stats()
        for client in self._clients.values():
            if client.requests:
                mine = _tokens_of(out, client.number, stats)
                for finish in mine.finished:
                    self._end(client, client.number << _CLIENT_SHIFT | finish.request_id)
                self._send(client, mine)
                if client.is_full:
                    self._end_all(client, _FULL)

    def _end_all(self, client: ClientLink, reason: str) -> None:
        """End what a client asked for; it is told behind the tokens that it was sent."""
        base = client.number << _CLIENT_SHIFT
        ended = [Finish(engine_id - base, "error", reason, 0, 0, 0) for engine_id in client.requests]
        for engine_id in list(client.requests):
            self._forget(client, engine_id)
        print(f"{reason}: {len(ended)} requests were ended", file=sys.stderr, flush=True)
        self._send(client, TokenOut(finished=ended))

    def _check_clients(self) -> None:
        """What waits for clients goes out.

        Every so often: end what dead clients asked for, and tell the living how busy the engine is.
        """
        for client in self._clients.values():
            if client.is_behind:
                client.flush()
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _SECONDS_BETWEEN_CHECKS
        for client in [client for client in self._clients.values() if client.is_lost or not client.alive]:
            for engine_id in list(client.requests):
                self._forget(client, engine_id)
            del self._clients[client.address]
        self._waiting_tokens, self._running_limit = self._loop.scheduler.count_tokens()
        self._look_at_memory(now)
        load = self._load()
        if load != self._last_load and not any(client.is_behind for client in self._clients.values()):
            self._last_load = load
            self._tell_all(load)

    def _stats(self) -> StepStats:
        scheduler, last = self._loop.scheduler, self._loop.last
        return StepStats(
            last.prefill,
            last.num_admitted,
            last.joined,
            scheduler.num_running,
            scheduler.num_waiting,
            self._waiting_tokens,
            self._running_limit,
            last.inference_ns,
            last.forward_ns,
            last.decode_ns,
            self._filter_ns,
            last.failed,
            last.num_prompt_tokens,
            last.num_decoded,
        )

    def _load(self) -> EngineLoad:
        scheduler = self._loop.scheduler
        stats = scheduler.stats
        return EngineLoad(
            scheduler.num_waiting,
            scheduler.num_running,
            scheduler.pool.num_free_of_all,
            stats.num_preemptions,
            stats.num_prompt_tokens,
            stats.num_cached_prompt_tokens,
            self._engine.rank.bucket_stats,
            self._num_malformed,
            scheduler.picture_work,
            self._memory,
        )

    def _look_at_memory(self, now: float) -> None:
        """Seldom: on some devices the driver is asked."""
        if now >= self._next_look:
            self._next_look = now + _SECONDS_BETWEEN_LOOKS
            self._memory = self._engine.rank.device.memory()

    def _send(self, client: ClientLink, message: FromEngine) -> None:
        failpoint("engine.encode")
        payload = wire.encode(message)
        failpoint("engine.send")
        client.send(payload)

    def _tell_all(self, message: FromEngine) -> None:
        for client in self._clients.values():
            self._send(client, message)


def _tokens_of(out: TokenOut, number: int, stats: StepStats) -> TokenOut:
    """The part of a step that belongs to one client, its ids restored."""
    low, high = number << _CLIENT_SHIFT, (number + 1) << _CLIENT_SHIFT
    rows = [row for row, request_id in enumerate(out.request_ids) if low <= request_id < high]
    new_row = {row: position for position, row in enumerate(rows)} if out.top_tokens else {}
    return TokenOut(
        [out.request_ids[row] - low for row in rows],
        [out.token_ids[row] for row in rows],
        [out.logprobs[row] for row in rows],
        [TopTokens(new_row[t.row], t.token_ids, t.logprobs) for t in out.top_tokens if t.row in new_row],
        [msgspec.structs.replace(p, row=p.row - low) for p in out.prompt_logprobs if low <= p.row < high],
        [
            msgspec.structs.replace(finish, request_id=finish.request_id - low)
            for finish in out.finished
            if low <= finish.request_id < high
        ],
        [
            Admitted(admitted.request_id - low, admitted.num_cached_tokens, admitted.queue_ns)
            for admitted in out.admitted
            if low <= admitted.request_id < high
        ],
        stats,
    )


def main(config: ServerConfig) -> int:
    """A program: the socket is its argument."""
    # Who stops a whole group or service signals this process too; the parent ends it, once requests are drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    _never_wait_for_readers()
    failpoints.configure(failpoints_asked())
    socket_path = Path(sys.argv[1])
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 1000)
    configure_socket(socket, config)
    try:
        engine = start_engine(
            config,
            lambda stage, done, total: _tell(Stage(stage, done, total)),
            socket_path.parent,
            lambda error: os._exit(_tell_failure(error)),
        )
        engine.seconds["warm-up"] = warm_up(engine, not config.disable_grammar_support)
        if engine.recorder is not None:
            engine.recorder.reset()  # prompts of our own do not count
        resume_collection()
        profiling = Profiling(config, engine.rank.profile)  # nor do their steps
        grows = config.step_timeout_s is None
        limit_s = engine.rank.step_timeout_s if config.step_timeout_s is None else config.step_timeout_s
        if limit_s and (config.num_shard or 1) > 1:
            limit_s += NAMING_S
        heartbeat = Heartbeat(heartbeat_path(socket_path), limit_s, grows)
        heartbeat.beat_in_thread()
        socket.bind(f"ipc://{socket_path}")
        _tell(EngineStarted(engine.seconds, engine.facts.notes))
        EngineServer(engine, socket, profiling, heartbeat).run()
    except TgiError as error:
        return _tell_failure(error)
    finally:
        socket.close()
        context.term()
    return 0


def _tell_failure(error: TgiError) -> int:
    """In one line; the exit status."""
    if isinstance(error, EngineError):
        print(f"engine failed: {error}", file=sys.stderr, flush=True)
        return EXIT_ENGINE_FAILED
    print(f"engine cannot start: {error}", file=sys.stderr, flush=True)
    return EXIT_START_FAILED


def configure_socket(socket: "zmq.Socket[bytes]", config: ServerConfig) -> None:
    """Limits in both directions. What a full client does not take is told, instead of being thrown away."""
    socket.setsockopt(zmq.SNDHWM, wire.HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, wire.HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.max_to_engine(payload_limit(config)))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)


def _tell(message: FromEngineProcess) -> None:
    """One line for whoever started this process."""
    print(msgspec.json.encode(message).decode(), flush=True)


def _never_wait_for_readers() -> None:
    """What is said on standard error is lost, rather than waited for, while nobody takes it: the pipe is this
    process's own, and steps go on when the one who reads it is stopped."""
    if stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
        os.set_blocking(sys.stderr.fileno(), False)
        sys.stderr = _LossyLines(sys.stderr)


class _LossyLines(io.TextIOBase):
    """Text to a descriptor that does not block."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        data = text.encode(errors="replace")
        with suppress(BlockingIOError):
            while data:
                data = data[os.write(self._stream.fileno(), data) :]
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()


def run(config: ServerConfig) -> NoReturn:
    status = main(config)
    if status == EXIT_ENGINE_FAILED:
        # The device may be in a state in which freeing what is on it crashes or hangs.
        os._exit(status)
    sys.exit(status)
