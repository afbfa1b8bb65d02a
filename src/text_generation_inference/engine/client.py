"""The engine as an api process sees it: submit, take tokens, abort.

Asyncio, never torch. A reader takes a message per step and hands each request its tokens; a request that is
read slowly finds several waiting for it, and one that is not read at all is ended before it has taken much memory. The
reader takes a bounded part of what waits in each turn of the event loop. When the engine fails or is gone, every
request in flight ends with `EngineError`.
"""

import asyncio
import logging
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from text_generation_inference.engine import wire
from text_generation_inference.errors import (
    EngineError,
    OverloadedError,
    RequestError,
    SlowClientError,
    TgiError,
    ValidationError,
)
from text_generation_inference.failpoints import failpoint
from text_generation_inference.types import (
    Abort,
    Admitted,
    EngineFailed,
    EngineLoad,
    Finish,
    FromEngine,
    GenerationRequest,
    Hello,
    ModelFacts,
    Profile,
    Profiled,
    Ready,
    StepStats,
    Submit,
    ToEngine,
    TokenOut,
)

log = logging.getLogger("text_generation_inference.api")

MAX_STREAM_BYTES = 4 * 2**20  # that events of one request may take while nobody reads them: some 20,000 plain tokens
MAX_HELD_BYTES = 256 * 2**20  # the same of all requests together
_TURN_S = 0.01  # that reading may take in one turn of the event loop
_MESSAGES_PER_TURN = 64
_EVENTS_PER_TAKE = 256
_SMALL_PILE = 64 * 2**10  # bytes
_EVENT_BYTES, _TOP_BYTES = 200, 150  # roughly what an event takes in memory, and each of its best tokens


class TokenEvent(msgspec.Struct, gc=False):
    """What a step brought for one request: its admission, a token, prompt log-probabilities, its end. A step may bring
    several tokens; what is before them comes with the first, the end with the last."""

    token_id: int | None = None
    logprob: float = 0.0
    top_tokens: list[tuple[int, float]] = []
    prompt_logprobs: list[tuple[int, list[float]]] = []  # (first token, values)
    prompt_top_tokens: dict[int, list[tuple[int, float]]] = {}  # by place, best first
    admitted: Admitted | None = None
    finish: Finish | None = None

    @property
    def num_bytes(self) -> int:
        """Without those of prompts, which come once."""
        return _EVENT_BYTES + _TOP_BYTES * len(self.top_tokens)


class TokenStream:
    """The events of one request, in order. Whoever submitted it must read to the end or call `abort`."""

    __slots__ = ("_client", "_error", "_events", "_finished", "_waiter", "has_token", "num_bytes", "request_id")

    def __init__(self, client: "EngineClient", request_id: int) -> None:
        self._client = client
        self.request_id = request_id
        self._events: list[TokenEvent] = []
        self._error: TgiError | None = None
        self.num_bytes = 0  # of what waits here, roughly
        self.has_token = False  # it has begun
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False

    async def take(self) -> list[TokenEvent]:
        """The events since the last call, waiting for one if there are none; empty only after `wake`.

        Of very many only some: the event loop does other work before it comes back for more.
        """
        if not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = self._client.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self._error is not None and not self._events:
                raise self._error
        events = self._events
        if len(events) <= _EVENTS_PER_TAKE:
            self._events = []
            self._give_back(self.num_bytes)
            return events
        events, self._events = events[:_EVENTS_PER_TAKE], events[_EVENTS_PER_TAKE:]
        self._give_back(sum(event.num_bytes for event in events))
        await asyncio.sleep(0)
        return events

    def _give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._client.num_held_bytes -= num_bytes

    @property
    def engine_responds(self) -> bool:
        return self._client.responds

    def drop_events(self) -> None:
        self._events = []
        self._give_back(self.num_bytes)

    def wake(self) -> None:
        """Let `take` return, with nothing if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """End the request wherever it is; nothing happens if it has ended."""
        self._client.abort(self)

    def push(self, event: TokenEvent) -> None:
        num_bytes = event.num_bytes
        self._events.append(event)
        self.has_token = self.has_token or event.token_id is not None
        self.num_bytes += num_bytes
        client = self._client
        client.num_held_bytes += num_bytes
        if self.num_bytes > MAX_STREAM_BYTES or client.num_held_bytes > MAX_HELD_BYTES:
            client.end_unread(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: TgiError) -> None:
        self._error = error
        self.wake()


class EngineClient:
    def __init__(self, socket_path: Path, max_message_bytes: int = wire.max_to_engine(2_000_000)) -> None:
        self._socket_path = socket_path
        self._max_message_bytes = max_message_bytes
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: Any = None
        self._descriptor = -1  # readable when the socket's state may have changed
        self._ids = count(1)
        self._streams: dict[int, TokenStream] = {}
        self._ready: asyncio.Future[ModelFacts] | None = None
        self._profiles: dict[int, asyncio.Future[Profiled]] = {}  # asked for and not answered
        self._unsent: deque[bytes] = deque()  # what the socket did not take, in order; never a new request
        self._reading_on = False  # a further turn of reading is due
        self.num_held_bytes = 0  # of events that nobody has taken
        self.num_malformed = 0
        self.responds = True  # as far as its signs of life tell those who look at them
        self.failure: EngineError | None = None  # set once the engine is lost; a new client is needed then
        self.load: EngineLoad | None = None
        self.on_load: Callable[[EngineLoad], None] | None = None
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_step_failure: Callable[[bool], None] | None = None  # of one with prompt tokens?
        self.on_failure: Callable[[Exception], None] | None = None  # of this client, not of the engine
        self.on_malformed: Callable[[], None] | None = None
        self.on_slow_client: Callable[[], None] | None = None

    async def connect(self, timeout_s: float = 10.0) -> ModelFacts:
        """Join the engine. Raises `EngineError` when it does not answer in time."""
        self.loop = asyncio.get_running_loop()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, wire.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, wire.HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FROM_ENGINE)
        self._socket.connect(f"ipc://{self._socket_path}")
        self._ready = self.loop.create_future()
        self._descriptor = self._socket.getsockopt(zmq.FD)
        self.loop.add_reader(self._descriptor, self._read)
        self._send(Hello(os.getpid()))
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {timeout_s:g} s") from None

    def next_id(self) -> int:
        return next(self._ids)

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def owes_first_token(self) -> bool:
        """Whether a request in flight has no token yet, so that its prompt is computed next."""
        return any(not stream.has_token for stream in self._streams.values())

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Send a request (with an id from `next_id`) on its way. Raises `OverloadedError` if the engine takes none."""
        if self.failure is not None:
            raise self.failure
        failpoint("api.submit")
        payload = wire.encode(Submit(request))
        if len(payload) > self._max_message_bytes:
            raise ValidationError(f"the request is too large: more than {self._max_message_bytes} bytes for the engine")
        self._flush()
        if self._unsent or not self._try_send(payload):
            raise OverloadedError("Model is overloaded")
        stream = TokenStream(self, request.id)
        self._streams[request.id] = stream
        self.loop.call_soon(self._read)
        return stream

    def abort(self, stream: TokenStream) -> None:
        stream.drop_events()
        if self._streams.pop(stream.request_id, None) is not None and self.failure is None:
            self._send(Abort(stream.request_id))

    async def profile(self, start: bool, num_steps: int | None = None, record_shapes: bool | None = None) -> Profiled:
        """Start or stop a profile of the engine's steps."""
        if self.failure is not None:
            raise self.failure
        number = self.next_id()
        answer = self._profiles[number] = self.loop.create_future()
        try:
            self._send(Profile(number, start, num_steps, record_shapes))
            return await answer
        finally:
            self._profiles.pop(number, None)

    def fail(self, error: EngineError) -> None:
        """The engine is lost: end every request in flight with this error."""
        if self.failure is not None:
            return
        self.failure = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        for answer in self._profiles.values():
            if not answer.done():
                answer.set_exception(error)

    async def close(self) -> None:
        if self._descriptor >= 0:
            self.loop.remove_reader(self._descriptor)
            self._descriptor = -1
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen, so that nothing is logged about it
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        """Never waits. What the socket does not take is kept; there are never more than the requests it has taken."""
        self._unsent.append(wire.encode(message))
        self._flush()
        # The descriptor tells of changes only, and sending may have taken note of one.
        self.loop.call_soon(self._read)

    def _flush(self) -> None:
        while self._unsent and self._try_send(self._unsent[0]):
            self._unsent.popleft()

    def _try_send(self, payload: bytes) -> bool:
        try:
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        """Take the messages that are there, as many as one turn of the event loop has time for."""
        try:
            end = time.monotonic() + _TURN_S
            num_taken = 0
            while self._descriptor >= 0 and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                if num_taken >= _MESSAGES_PER_TURN or (num_taken and time.monotonic() >= end):
                    if not self._reading_on:
                        self._reading_on = True
                        self.loop.call_soon(self._read_on)
                    break
                self._take_payload(self._socket.recv(zmq.NOBLOCK))
                num_taken += 1
            if self._unsent and self._descriptor >= 0:
                self._flush()
        except Exception as error:
            self.fail(EngineError("the engine's messages cannot be read"))
            if self.on_failure is not None:
                self.on_failure(error)

    def _read_on(self) -> None:
        self._reading_on = False
        self._read()

    def _take_payload(self, payload: bytes) -> None:
        try:
            self._take(wire.decode_from_engine(payload))
        except Exception as error:
            self._drop(payload, error)

    def _drop(self, payload: bytes, error: Exception) -> None:
        """A message that means nothing. Tokens may have been in it, so nobody may go on as if there were none missing:
        the requests in flight end, the connection and whoever comes next do not."""
        self.num_malformed += 1
        log.error("A malformed message of %d bytes from the engine was dropped: %s", len(payload), error)
        if self.on_malformed is not None:
            self.on_malformed()
        for stream in list(self._streams.values()):
            self.abort(stream)
            stream.fail(RequestError("a message of the engine was lost"))

    def _take(self, message: FromEngine) -> None:
        match message:
            case TokenOut() as out:
                self._deliver(out)
            case EngineLoad() as load:
                self.load = load
                if self.on_load is not None:
                    self.on_load(load)
            case Ready(facts=facts):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(facts)
            case Profiled() as done:
                answer = self._profiles.get(done.number)
                if answer is not None and not answer.done():
                    answer.set_result(done)
            case EngineFailed(error=error, prefill=prefill):
                if self.on_step_failure is not None:
                    self.on_step_failure(prefill)
                log.error("The engine failed: %s", error)
                self.fail(EngineError("a step failed on the device"))  # clients are told: no words of the device's own

    def _deliver(self, out: TokenOut) -> None:
        """One event per token of the step."""
        failpoint("api.deliver")
        streams = self._streams
        logprobs = shortest_floats(out.logprobs)
        if not (out.top_tokens or out.prompt_logprobs or out.finished or out.admitted):  # the usual step
            for request_id, token_id, logprob in zip(out.request_ids, out.token_ids, logprobs, strict=True):
                stream = streams.get(request_id)
                if stream is not None:
                    stream.push(TokenEvent(token_id, logprob))
        else:
            self._deliver_more(out, logprobs)
        if out.stats is not None and self.on_step is not None:
            self.on_step(out.stats)

    def end_unread(self, stream: TokenStream) -> None:
        """Events pile up because nobody takes them: of this request, or of all, of which then the largest pile goes."""
        if stream.num_bytes <= MAX_STREAM_BYTES:
            stream = max(self._streams.values(), key=lambda stream: stream.num_bytes, default=stream)
            if stream.num_bytes < _SMALL_PILE:  # what is held belongs to requests that have ended
                return
        self.abort(stream)
        stream.fail(SlowClientError("the client did not read what was generated for it"))
        if self.on_slow_client is not None:
            self.on_slow_client()

    def _deliver_more(self, out: TokenOut, logprobs: list[float]) -> None:
        events = [TokenEvent(token_id, logprob) for token_id, logprob in zip(out.token_ids, logprobs, strict=True)]
        for top in out.top_tokens:
            pairs = zip(top.token_ids, shortest_floats(top.logprobs), strict=True)
            events[top.row].top_tokens = list(pairs)
        by_request: dict[int, list[TokenEvent]] = {}
        for request_id, event in zip(out.request_ids, events, strict=True):
            by_request.setdefault(request_id, []).append(event)

        def events_of(request_id: int) -> list[TokenEvent]:
            if request_id not in by_request:
                by_request[request_id] = [TokenEvent()]
            return by_request[request_id]

        for prompt in out.prompt_logprobs:
            event = events_of(prompt.row)[0]
            event.prompt_logprobs = [*event.prompt_logprobs, (prompt.start, shortest_floats(prompt.logprobs))]
            for place, ids in enumerate(prompt.top_ids):
                values = shortest_floats(prompt.top_logprobs[place])
                event.prompt_top_tokens[prompt.start + place] = list(zip(ids, values, strict=True))
        for admitted in out.admitted:
            events_of(admitted.request_id)[0].admitted = admitted
        for finish in out.finished:
            events_of(finish.request_id)[-1].finish = finish
        for request_id, own in by_request.items():
            for event in own:
                stream = self._streams.get(request_id)  # one that piles up too much ends with any event
                if stream is not None:
                    stream.push(event)
            if own[-1].finish is not None:
                self._streams.pop(request_id, None)


_SINGLE = struct.Struct("f")
_FEW_VALUES = 32  # below this many the vectorised way costs more


def shortest_floats(values: list[float]) -> list[float]:
    """Each float32 value as the number with the fewest digits that is still that float32, as clients of TGI see it."""
    if len(values) < _FEW_VALUES:
        return [_shortest(value) for value in values]
    exact = np.array(values, dtype=np.float64)
    singles = exact.astype(np.float32)
    with np.errstate(all="ignore"):
        exponents = np.floor(np.log10(np.abs(exact)))
        result, left = exact.copy(), (exponents > -14) & (exponents < 6)  # powers of ten are exact there
        for digits in (6, 7, 8, 9):
            scale = 10.0 ** (digits - 1 - exponents)
            rounded = np.rint(exact * scale) / scale
            same = left & (rounded.astype(np.float32) == singles)
            result[same] = rounded[same]
            left &= ~same
    shortened = result.tolist()
    for row in np.flatnonzero((exponents <= -14) | (exponents >= 6)):
        shortened[row] = _shortest(values[row])
    return shortened


def _shortest(value: float) -> float:
    try:
        single = _SINGLE.pack(value)
    except OverflowError:
        return value
    for digits in (6, 7, 8):
        rounded = float(f"{value:.{digits}g}")
        if _SINGLE.pack(rounded) == single:
            return rounded
    return float(f"{value:.9g}")
