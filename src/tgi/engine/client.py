"""The engine as an api process sees it: submit, abort, stream.

Level 7, asyncio, never torch. One reader task takes a message per step and hands each request its tokens. When the
engine fails or is gone, every request in flight ends with `EngineError`.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tgi.errors import EngineError
from tgi.types import (
    Abort,
    EngineFailed,
    EngineLoad,
    Finish,
    FromEngine,
    GenerationRequest,
    Hello,
    ModelFacts,
    Ready,
    Submit,
    ToEngine,
    TokenOut,
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromEngine).decode


class TokenEvent(msgspec.Struct):
    """What one step brought for one request: a token, or prompt log-probabilities, or its end, or several of these."""

    token_id: int | None = None
    logprob: float = 0.0
    top_tokens: list[tuple[int, float]] = []
    prompt_logprobs: list[tuple[int, list[float]]] = []  # (first token, values)
    finish: Finish | None = None


class EngineClient:
    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._context: Any = zmq.asyncio.Context()
        self._socket: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._ids = count(1)
        self._streams: dict[int, asyncio.Queue[TokenEvent | EngineError]] = {}
        self._ready: asyncio.Future[ModelFacts] | None = None
        self.failure: EngineError | None = None  # set once the engine is lost; a new client is needed then
        self.load: EngineLoad | None = None

    async def connect(self, timeout_s: float = 10.0) -> ModelFacts:
        """Join the engine. Raises `EngineError` when it does not answer in time."""
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(f"ipc://{self._socket_path}")
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        await self._send(Hello(os.getpid()))
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {timeout_s:g} s") from None

    def next_id(self) -> int:
        return next(self._ids)

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Submit a request (with an id from `next_id`) and yield its events. Leaving early aborts it."""
        if self.failure is not None:
            raise self.failure
        events: asyncio.Queue[TokenEvent | EngineError] = asyncio.Queue()
        self._streams[request.id] = events
        finished = False
        try:
            await self._send(Submit(request))
            while not finished:
                event = await events.get()
                if isinstance(event, EngineError):
                    finished = True
                    raise event
                finished = event.finish is not None
                yield event
        finally:
            del self._streams[request.id]
            if not finished and self.failure is None:
                self._socket.send(_encode(Abort(request.id)), zmq.NOBLOCK)

    def fail(self, error: EngineError) -> None:
        """The engine is lost: end every request in flight with this error."""
        self.failure = error
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for events in self._streams.values():
            events.put_nowait(error)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    async def _send(self, message: ToEngine) -> None:
        await self._socket.send(_encode(message))

    async def _read(self) -> None:
        while True:
            match _decode(await self._socket.recv()):
                case TokenOut() as out:
                    self._deliver(out)
                case EngineLoad() as load:
                    self.load = load
                case Ready(facts=facts):
                    assert self._ready is not None
                    self._ready.set_result(facts)
                case EngineFailed(error=error):
                    self.fail(EngineError(error))

    def _deliver(self, out: TokenOut) -> None:
        """One event per request of the step."""
        events: dict[int, TokenEvent] = {}
        for request_id, token_id, logprob in zip(out.request_ids, out.token_ids, out.logprobs, strict=True):
            events[request_id] = TokenEvent(token_id, logprob)
        for top in out.top_tokens:
            events[out.request_ids[top.row]].top_tokens = list(zip(top.token_ids, top.logprobs, strict=True))
        for prompt in out.prompt_logprobs:
            event = events.setdefault(prompt.row, TokenEvent())
            event.prompt_logprobs = [*event.prompt_logprobs, (prompt.start, prompt.logprobs)]
        for finish in out.finished:
            events.setdefault(finish.request_id, TokenEvent()).finish = finish
        for request_id, event in events.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put_nowait(event)
