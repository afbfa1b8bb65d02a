"""A client process: sends the requests of a phase when they are due, or for its share of the users, and reports.

    python -m text_generation_inference.bench.serve.worker ENDPOINT

The command connects to the endpoint; when standard input ends, so does the process. A timer that does nothing else than
be late says how far behind this process was.
"""

import gc
import resource
import select
import shutil
import signal
import sys
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Any

from text_generation_inference.bench.serve.apis import ApiCall
from text_generation_inference.bench.serve.channel import Channel
from text_generation_inference.bench.serve.client import READ, Client, Exchange
from text_generation_inference.bench.serve.messages import (
    ClientReady,
    Cut,
    EncodedRequest,
    Finished,
    Go,
    More,
    Need,
    Outcome,
    Outcomes,
    StartPhase,
    ToClient,
)

PAUSE_AFTER_FAILURE_S = 0.1  # of a user: a server that refuses at once is not flooded
_TICK_S = 0.01
_REPORT_S = 0.1
_WAIT_S = 0.5


class _Phase:
    """Drives one phase; `step` is called as often as something may have happened."""

    def __init__(self, start: StartPhase, worker: "_Worker") -> None:
        self._start, self._worker = start, worker
        self._requests = deque(start.requests)
        self._has_all = start.has_all
        self._asked = False
        self._idle_users = 0
        self._pauses: deque[float] = deque()
        self._next_due = 0
        self._begin = 0.0
        self._next_tick = 0.0
        self._starved = 0.0
        self._last_step = 0.0
        self._cpu = 0.0
        self.num_ended = 0
        self.is_cut = False
        self.is_running = False
        self.lags: array[float] = array("d")

    def go(self, at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        self._begin = self._last_step = at
        self._next_tick = at + _TICK_S
        self._cpu = cpu_seconds()
        self._idle_users = self._start.users
        self.is_running = True

    def add(self, more: More) -> None:
        self._requests += more.requests
        self._has_all = more.has_all
        self._asked = False

    def on_end(self, exchange: Exchange) -> None:
        self.num_ended += 1
        if not self._start.users:
            return
        if exchange.error is None:
            self._idle_users += 1
            self._start_users(time.monotonic())
        else:
            self._pauses.append(time.monotonic() + PAUSE_AFTER_FAILURE_S)

    def step(self) -> float:
        """Send what is due; returns the moment at which to come back at the latest."""
        now = time.monotonic()
        while self._next_tick <= now:
            self.lags.append(now - self._next_tick)
            self._next_tick += _TICK_S
        wake = self._next_tick
        if self._start.users:
            if self._idle_users and not self._requests and not self._has_all:
                self._starved += now - self._last_step
            while self._pauses and self._pauses[0] <= now:
                self._pauses.popleft()
                self._idle_users += 1
            self._start_users(now)
            wake = min(wake, self._pauses[0]) if self._pauses else wake
        else:
            due, client = self._start.due, self._worker.client
            while self._next_due < len(due) and self._begin + due[self._next_due] <= now:
                request = self._requests.popleft()
                client.send(Exchange(request.number, request.data, self._begin + due[self._next_due]))
                self._next_due += 1
            if self._next_due < len(due):
                wake = min(wake, self._begin + due[self._next_due])
        self._last_step = now
        return wake

    def _start_users(self, now: float) -> None:
        if self.is_cut or self._is_late(now):
            return
        while self._idle_users and self._requests:
            request: EncodedRequest = self._requests.popleft()
            self._idle_users -= 1
            self._worker.client.send(Exchange(request.number, request.data, now))
        if not self._has_all and not self._asked and len(self._requests) < self._start.users:
            self._asked = True
            self._worker.channel.send(Need(2 * self._start.users))

    def _is_late(self, now: float) -> bool:
        return self._start.seconds is not None and now - self._begin >= self._start.seconds

    def is_over(self) -> bool:
        """Users stop in the middle of their answers once one has ended; other requests are waited for."""
        if self.is_cut:
            return True
        in_flight = self._worker.client.in_flight
        if not self._start.users:
            return self._next_due == len(self._start.due) and not in_flight
        if self._is_late(time.monotonic()):
            return self.num_ended > 0 or not in_flight
        return self._has_all and not self._requests and not in_flight and not self._pauses

    def finish(self) -> Finished:
        return Finished(
            started=self._begin,
            ended=time.monotonic(),
            cpu_seconds=cpu_seconds() - self._cpu,
            lags=self.lags.tobytes(),
            starved_seconds=self._starved,
        )


class _Worker:
    def __init__(self, endpoint: str) -> None:
        self.channel = Channel(endpoint, ToClient, bind=True)
        self._phase: _Phase | None = None
        self._outcomes: list[Outcome] = []
        self._num_tokens = 0
        self._next_report = 0.0
        self._is_wanted = True
        settings, *more = self._first_words()
        call = ApiCall(api=settings.api, model=None)
        self.client = Client(settings.address, call.read_event(), settings.timeout_s, self._on_end)
        self.client.selector.register(self.channel, READ, lambda mask: None)  # `run` takes what has come
        self.client.selector.register(sys.stdin, READ, self._on_input)
        self._obey(more)

    def _first_words(self) -> list[Any]:
        """The settings, and what came with them."""
        while not (messages := self.channel.receive()):
            if select.select([self.channel, sys.stdin], [], [], _WAIT_S)[0] == [sys.stdin]:
                sys.exit(0)
        return messages

    def _on_input(self, mask: int) -> None:
        """Nothing is ever written there: it was closed."""
        self._is_wanted = False

    def run(self) -> None:
        while self._is_wanted:
            while messages := self.channel.receive():
                self._obey(messages)
            phase = self._phase
            if phase is None or not phase.is_running:
                self.client.poll(_WAIT_S)
                continue
            wake = phase.step()
            self.client.poll(wake - time.monotonic())
            if phase.is_over():
                self._end_phase(phase)
            elif self.client.now >= self._next_report:
                self._report()
        self.client.close()

    def _obey(self, messages: list[Any]) -> None:
        for message in messages:
            match message:
                case StartPhase():
                    gc.collect()
                    gc.disable()
                    self._num_tokens = 0
                    self._phase = _Phase(message, self)
                    self.channel.send(ClientReady())
                case Go(at=at) if self._phase is not None:
                    self._phase.go(at)
                case More() if self._phase is not None:
                    self._phase.add(message)
                case Cut() if self._phase is not None:
                    self._phase.is_cut = True
                case _:
                    pass

    def _on_end(self, exchange: Exchange) -> None:
        self._outcomes.append(_outcome_of(exchange))
        self._num_tokens += len(exchange.answer.times)
        if self._phase is not None:
            self._phase.on_end(exchange)

    def _report(self) -> None:
        self._next_report = self.client.now + _REPORT_S
        running = sum(len(exchange.answer.times) for exchange in self.client.in_flight)
        self.channel.send(Outcomes(self._outcomes, self._num_tokens + running))
        self._outcomes = []

    def _end_phase(self, phase: _Phase) -> None:
        finished = phase.finish()
        self._outcomes += [_outcome_of(exchange) for exchange in self.client.cut()]
        self._report()
        self.channel.send(finished)
        self._phase = None
        gc.enable()


def _outcome_of(exchange: Exchange) -> Outcome:
    answer = exchange.answer
    return Outcome(
        exchange.number,
        exchange.planned,
        exchange.sent,
        exchange.end,
        answer.times.tobytes(),
        answer.num_generated,
        answer.num_prompt,
        exchange.error,
    )


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which says when to stop
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    endpoint = sys.argv[1]
    try:
        _Worker(endpoint).run()
    finally:  # the command may have been killed
        shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
