"""The client processes, seen from the command: starts them, gives them their shares of a phase, collects what they saw.

Makes requests only when a process asks for more, or before a phase starts; while one runs it mostly waits.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import zmq

from text_generation_inference.bench.serve.channel import Channel
from text_generation_inference.bench.serve.messages import (
    ClientReady,
    Cut,
    EncodedRequest,
    Finished,
    FromClient,
    Go,
    More,
    Need,
    Outcome,
    Outcomes,
    Settings,
    StartPhase,
)
from text_generation_inference.errors import StartError

_START_DELAY_S = 0.05
_LIMIT_S = 60.0  # for a process to be ready or to end a phase that was cut
_WAIT_S = 0.1


@dataclass(slots=True, kw_only=True)
class LoadPlan:
    """A phase: `users`, or requests that are due `due` seconds after its start."""

    users: int = 0
    due: list[float] = field(default_factory=list)
    seconds: float | None = None  # users send nothing after it
    num_requests: int | None = None  # of the users; None: as many as they can


@dataclass(slots=True)
class Record:
    """What the processes saw of a phase."""

    outcomes: list[Outcome] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    is_interrupted: bool = False


@dataclass(slots=True)
class LoadProgress:
    elapsed: float
    num_ended: int
    num_failed: int
    num_tokens: int


class _Process:
    """A client process. It ends when its standard input is closed, however this process ends."""

    def __init__(self, endpoint: str, settings: Settings) -> None:
        command = [sys.executable, "-m", "text_generation_inference.bench.serve.worker", endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self.channel = Channel(endpoint, FromClient, bind=False)
        self.channel.send(settings)
        self.is_ready = False
        self.is_finished = True
        self.num_tokens = 0

    def let_go(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def close(self) -> None:
        self.channel.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ClientPool:
    """Use as a context: the processes end with it."""

    def __init__(self, settings: Settings, num_processes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="tgi-bench-", ignore_cleanup_errors=True
        )  # for this user alone
        endpoints = [f"ipc://{self._folder.name}/{number}" for number in range(num_processes)]
        self._processes = [_Process(endpoint, settings) for endpoint in endpoints]
        self._poller = zmq.Poller()
        for process in self._processes:
            self._poller.register(process.channel.socket, zmq.POLLIN)

    @property
    def pids(self) -> list[int]:
        return [process.process.pid for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.let_go()  # all at once, then wait for each
        for process in self._processes:
            process.close()
        self._folder.cleanup()

    def run(
        self,
        plan: LoadPlan,
        make_request: Callable[[], EncodedRequest],
        tell: Callable[[LoadProgress], None],
        is_stopped: Callable[[], bool],
    ) -> Record:
        """`make_request` is called once for every request, in the order in which they are due."""
        record = Record()
        supply = _Supply(plan.num_requests, make_request, is_stopped)
        busy = self._start(plan, supply)
        if is_stopped():
            record.is_interrupted = True
        for process in busy:
            process.is_ready = False
        self._wait_for(lambda: all(process.is_ready for process in busy), record, supply)
        begin = time.monotonic() + _START_DELAY_S
        for process in busy:
            process.channel.send(Go(begin))
        num_failed = 0
        seen = 0
        cut_at: float | None = None
        while not all(process.is_finished for process in busy):
            self._exchange(record, supply, _WAIT_S)
            num_failed += sum(1 for outcome in record.outcomes[seen:] if outcome.error is not None)
            seen = len(record.outcomes)
            now = time.monotonic()
            tell(LoadProgress(now - begin, seen, num_failed, sum(process.num_tokens for process in busy)))
            if cut_at is None and is_stopped():
                record.is_interrupted, cut_at = True, now
                for process in busy:
                    process.channel.send(Cut())
            if cut_at is not None and now - cut_at > _LIMIT_S:
                raise StartError("a client process did not end its phase")
        return record

    def _start(self, plan: LoadPlan, supply: "_Supply") -> list[_Process]:
        """Hand out shares; a process without one has nothing to do."""
        count = len(self._processes)
        busy: list[_Process] = []
        if plan.due:
            requests = supply.take(len(plan.due))
            due = plan.due[: len(requests)]
            shares = [
                StartPhase(due=due[place::count], requests=requests[place::count], has_all=True)
                for place in range(count)
            ]
        else:
            users = [plan.users // count + (place < plan.users % count) for place in range(count)]
            shares = [StartPhase(users=share, seconds=plan.seconds, requests=supply.take(2 * share)) for share in users]
            for share in shares:
                share.has_all = supply.is_empty
        for process, share in zip(self._processes, shares, strict=True):
            if share.due or share.users:
                process.is_finished, process.num_tokens = False, 0
                process.channel.send(share)
                busy.append(process)
        return busy

    def _wait_for(self, condition: Callable[[], bool], record: Record, supply: "_Supply") -> None:
        end = time.monotonic() + _LIMIT_S
        while not condition():
            if time.monotonic() > end:
                raise StartError("a client process did not become ready")
            self._exchange(record, supply, _WAIT_S)

    def _exchange(self, record: Record, supply: "_Supply", seconds: float) -> None:
        """Take what the processes say, give what they ask for."""
        self._poller.poll(int(1e3 * seconds))
        for process in self._processes:
            for message in process.channel.receive():
                match message:
                    case ClientReady():
                        process.is_ready = True
                    case Need(count=count):
                        process.channel.send(More(supply.take(count), supply.is_empty))
                    case Outcomes():
                        record.outcomes += message.outcomes
                        process.num_tokens = message.num_tokens
                    case Finished():
                        record.finished.append(message)
                        process.is_finished = True
                    case _:
                        pass
            status = process.process.poll()
            if status is not None:
                reason = signal.Signals(-status).name if status < 0 else f"status {status}"
                raise StartError(f"a client process ended unexpectedly ({reason})")


class _Supply:
    """Requests, as many as there may be."""

    def __init__(self, most: int | None, make: Callable[[], EncodedRequest], is_stopped: Callable[[], bool]) -> None:
        self._left, self._make, self._is_stopped = most, make, is_stopped

    @property
    def is_empty(self) -> bool:
        return self._left == 0 or self._is_stopped()

    def take(self, count: int) -> list[EncodedRequest]:
        """Fewer when there are no more, or when nobody wants them any longer."""
        if self._left is not None:
            count = min(count, self._left)
        taken: list[EncodedRequest] = []
        while len(taken) < count and not self._is_stopped():
            taken.append(self._make())
        if self._left is not None:
            self._left -= len(taken)
        return taken
