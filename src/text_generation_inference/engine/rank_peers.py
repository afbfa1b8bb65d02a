"""The processes of ranks 1, 2, ...: started, told, watched and ended together.

A thread watches their sockets. Whatever happens to one of them, a death or a failure that it reports, ends all of them:
a group in which a rank is gone is of no use to anybody. The thread also starts them, because the kernel ends a process
when the thread that started it is gone: nothing outlives the engine, however that ends.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.machines import Machines, ranks_of
from text_generation_inference.engine.rank_channel import (
    LACK,
    BeginRank,
    CloseRank,
    Link,
    RankAnswer,
    RankDone,
    RankFailed,
    RankOrder,
    RankReport,
    decode_report,
    encode,
    error_from,
)
from text_generation_inference.errors import EngineError, StartError, TgiError
from text_generation_inference.weights.progress import Progress, silent

TICK_S = 0.25
_SEND_S = 10.0  # a rank that takes nothing for so long hangs
_CAUSE_S = 0.5  # a rank that fails says so before others feel it, or soon after
_CLOSE_S = 5.0
_MODULE = "text_generation_inference.engine.rank_main"


@dataclass
class _Peer:
    rank: int
    link: Link
    process: "subprocess.Popen[bytes] | None"  # None: on another machine, whose ranks `Machines` ends

    def describe_end(self) -> str:
        if self.process is None:
            return f"rank {self.rank}, on another machine, is gone"
        try:
            status = self.process.wait(1)
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} is gone"
        if status < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-status).name}"
        return f"rank {self.rank} ended with status {status}"


class RankPeers:
    """`on_lack`: a rank lacked memory in a step; `on_sum`: the sum of a rank's tokens; `on_failure`: all is over.

    All of these, and `on_tick`, which comes several times a second, are called on the watching thread.
    """

    def __init__(
        self,
        config: ServerConfig,
        on_lack: Callable[[int, int, str], None],
        on_sum: Callable[[int, int, int], None],
        on_failure: Callable[[TgiError], None],
        on_tick: Callable[[], None],
        progress: Progress = silent,
    ) -> None:
        self._config, self._progress = config, progress
        self._count = (config.num_shard or 1) - 1
        self._machines = Machines(config)
        self._on_lack, self._on_sum, self._on_failure, self._on_tick = on_lack, on_sum, on_failure, on_tick
        self._peers: list[_Peer] = []
        self._next = 0  # number of the next order
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: dict[int, dict[int, msgspec.Raw]] = {}  # of an order, by rank
        self._first_answer: tuple[int, float] | None = None  # number of an order, and when the first rank answered it
        self._failure: TgiError | None = None
        self._closing = False
        self._started = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="tgi-ranks", daemon=True)
        self._watcher.start()
        self._started.wait()
        self.check()

    @property
    def pids(self) -> list[int]:
        return [peer.process.pid for peer in self._peers if peer.process is not None]

    @property
    def failure(self) -> TgiError | None:
        return self._failure

    def check(self) -> None:
        """Raises what ended the ranks, if something has."""
        if self._failure is not None:
            raise self._failure

    # -- orders ----------------------------------------------------------------------------------------------------

    def begin(self, orders: Sequence[BeginRank]) -> int:
        return self._send([encode(order) for order in orders])

    def tell(self, order: RankOrder) -> int:
        """The same bytes to all ranks; the order's number. A rank that cannot be told has failed."""
        return self._send([encode(order)] * self._count)

    def _send(self, payloads: list[bytes]) -> int:
        with self._sending:
            number = self._next
            self._next += 1
            for peer, payload in zip(self._peers, payloads, strict=True):
                try:
                    peer.link.send(number, payload)
                except OSError:
                    if self.wait_for_failure(_CAUSE_S) is None:
                        self.fail(EngineError(f"rank {peer.rank} takes no orders"))
                    break
        return number

    def collect(self, number: int, seconds: float | None = None) -> list[msgspec.Raw]:
        """What each rank answered, once all have. Raises what ended them, or `EngineError` if that takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._has_all(number), seconds)
            self.check()
            answers = self._answers.pop(number, {})
        silent = [str(peer.rank) for peer in self._peers if peer.rank not in answers]
        if silent:
            self.fail(EngineError(f"no answer from rank {', '.join(silent)}"))
            self.check()
        return [answers[peer.rank] for peer in self._peers]

    def _has_all(self, number: int) -> bool:
        return len(self._answers.get(number, ())) == self._count

    def take_answers(self, number: int) -> dict[int, msgspec.Raw]:
        """Those that are there, by rank."""
        with self._changed:
            return self._answers.pop(number, {})

    def first_answer(self, number: int) -> float | None:
        """When it came, if one has."""
        first = self._first_answer
        return first[1] if first is not None and first[0] == number else None

    def wait_for_failure(self, seconds: float = _CAUSE_S) -> TgiError | None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, seconds)
            return self._failure

    # -- the end ---------------------------------------------------------------------------------------------------

    def fail(self, error: TgiError) -> None:
        """Ends all ranks. The first reason counts."""
        with self._changed:
            if self._failure is not None or self._closing:
                return
            self._failure = error
            self._changed.notify_all()
        self.kill()
        self._on_failure(error)

    def kill(self) -> None:
        self._machines.end()
        for process in self._processes:
            process.kill()

    @property
    def _processes(self) -> "list[subprocess.Popen[bytes]]":
        return [peer.process for peer in self._peers if peer.process is not None]

    def begin_close(self) -> None:
        """From now on ranks end by themselves, and that is no failure."""
        with self._changed:
            self._closing = True
        if self._failure is None:
            self.tell(CloseRank())

    def close(self) -> None:
        """Waits for them a while; whoever is left then is ended."""
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()) if self._failure is None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watcher.join(_CLOSE_S)
        self._machines.end()

    def abandon(self) -> None:
        """Ends them at once, whatever they do."""
        with self._changed:
            self._closing = True
        self.kill()
        for process in self._processes:
            process.wait()
        self._watcher.join(_CLOSE_S)

    # -- the watching thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._peers = [_start(rank) for rank in ranks_of(self._config, 0)[1:]]
            if self._config.nnodes > 1:
                links = self._machines.gather(self._progress)
                self._peers += [_Peer(rank, _link(links[rank]), None) for rank in sorted(links)]
        except OSError as error:
            self._failure = StartError(f"a process for a rank cannot be started: {error.strerror}")
        except StartError as error:
            self._failure = error
        finally:
            self._started.set()
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer.link, selectors.EVENT_READ, peer)
            while selector.get_map():
                for key, _ in selector.select(TICK_S):
                    peer: _Peer = key.data
                    if not self._read(peer):
                        selector.unregister(peer.link)
                        peer.link.close()
                if self._failure is None and not self._closing:
                    self._on_tick()

    def _read(self, peer: _Peer) -> bool:
        """False: it is gone."""
        frames = peer.link.read()
        if frames is None:
            if self._failure is None and not self._closing:
                self.fail(EngineError(peer.describe_end()))
            return False
        for number, payload in frames:
            report: RankReport = decode_report(payload)
            match report:
                case RankAnswer(value=value):
                    with self._changed:
                        if number not in self._answers:
                            self._first_answer = (number, time.monotonic())
                        self._answers.setdefault(number, {})[peer.rank] = value
                        self._changed.notify_all()
                case RankFailed(kind=kind, error=error) if kind == LACK:
                    self._on_lack(peer.rank, number, error)
                case RankFailed() as failed:
                    self.fail(error_from(failed, peer.rank))
                case RankDone(checksum=checksum):
                    self._on_sum(peer.rank, number, checksum)
        return True


def _start(rank: int) -> _Peer:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=dict(os.environ),
        )
    return _Peer(rank, _link(ours), process)


def _link(stream: socket.socket) -> Link:
    stream.settimeout(_SEND_S)
    return Link(stream)
