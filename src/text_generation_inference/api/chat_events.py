"""A chat answer as events that every chat API tells in its own words: parts that begin, grow and end, one at a time.

A part is thoughts, text, or the call of a tool. `AnswerReader` makes the events of one choice from its pieces; an API
is an `AnswerWriter` that turns them into bytes, or a function of the whole `parts_of` an answer.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import msgspec

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_run import Chat
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.http import KEEP_ALIVE
from text_generation_inference.errors import TgiError
from text_generation_inference.text.tools import CallArguments, CallStart, Content

PartKind = Literal["thoughts", "text", "call"]


class PartBegin(msgspec.Struct, gc=False):
    """Of a call: which one it is, from 0, its id and its function."""

    kind: PartKind
    index: int = 0
    id: str = ""
    name: str = ""


class PartDelta(msgspec.Struct, gc=False):
    """More of the part that began last. Of a call: more of its arguments, in all the text of a JSON object."""

    kind: PartKind
    text: str
    index: int = 0


class PartEnd(msgspec.Struct, gc=False):
    kind: PartKind
    index: int = 0


AnswerEvent = PartBegin | PartDelta | PartEnd


class AnswerReader:
    """The events of one choice."""

    def __init__(self, chat: Chat, generation: Generation) -> None:
        self._chat, self._generation = chat, generation
        self._parser = chat.parser()
        self._open: PartBegin | None = None
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether all of the answer is text, and nothing is told of its tokens."""
        return self._parser is None and self._chat.plan.reasoning is None and not self._chat.body.logprobs

    def read(self, piece: Piece) -> list[AnswerEvent]:
        chat, events = self._chat, list[AnswerEvent]()
        thoughts, text = chat.told(piece)
        if thoughts:
            self._grow(events, "thoughts", thoughts)
        parts = [Content(text)] if text else []
        if self._parser is not None:
            parts = self._parser.push(text)
            if piece.last:
                parts += self._parser.finish(cut=self._generation.finish_reason == "length")
        for part in filter(chat.keeps, parts):
            match part:
                case Content(text=more):
                    self._grow(events, "text", more)
                case CallStart(index=index, name=name):
                    self.num_calls += 1
                    self._begin(events, PartBegin("call", index, chat.new_call_id(name, index), name))
                case CallArguments(index=index, text=more):
                    events.append(PartDelta("call", more, index))
        if piece.last:
            self._end(events)
        return events

    def _grow(self, events: list[AnswerEvent], kind: PartKind, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(events, PartBegin(kind))
        events.append(PartDelta(kind, text))

    def _begin(self, events: list[AnswerEvent], part: PartBegin) -> None:
        self._end(events)
        self._open = part
        events.append(part)

    def _end(self, events: list[AnswerEvent]) -> None:
        if self._open is not None:
            events.append(PartEnd(self._open.kind, self._open.index))
        self._open = None


class AnswerPart(msgspec.Struct):
    """A part that is complete."""

    kind: PartKind
    text: str
    id: str = ""
    name: str = ""


def parts_of(chat: Chat, generation: Generation, pieces: Sequence[Piece]) -> list[AnswerPart]:
    """A whole answer."""
    reader = AnswerReader(chat, generation)
    begun: list[tuple[PartBegin, list[str]]] = []
    for piece in pieces:
        for event in reader.read(piece):
            if isinstance(event, PartBegin):
                begun.append((event, []))
            elif isinstance(event, PartDelta):
                begun[-1][1].append(event.text)
    return [AnswerPart(part.kind, "".join(texts), part.id, part.name) for part, texts in begun]


class AnswerWriter(Protocol):
    """One choice in the words of an API. What each call returns may be several events, or none."""

    def begin(self) -> bytes:
        """Before there is a token."""
        ...

    def text(self, text: str) -> bytes:
        """More text, of an answer that is text alone."""
        ...

    def tell(self, events: Sequence[AnswerEvent], piece: Piece) -> bytes:
        """What a piece brought."""
        ...

    def finish(self, num_calls: int) -> bytes:
        """The answer is complete; its generation says why."""
        ...


async def stream_answer(call: Call, chat: Chat, generation: Generation, writer: AnswerWriter) -> None:
    """One choice on its way to the client."""
    connection, reader = call.connection, AnswerReader(chat, generation)
    plain = reader.is_plain
    if begun := writer.begin():
        await connection.write(begun)
    while not generation.finish_reason:
        pieces = await generation.take()
        if not pieces:
            await connection.write(KEEP_ALIVE)
            continue
        if plain:
            frames = [writer.text(piece.text) for piece in pieces if piece.text]
        else:
            frames = [writer.tell(reader.read(piece), piece) for piece in pieces]
        if generation.finish_reason:
            frames.append(writer.finish(reader.num_calls))
        data = b"".join(frames)
        if data:
            await connection.write(data)
    call.succeed(generation)


async def stream_events(
    call: Call, chat: Chat, run: Callable[[], Awaitable[None]], fail: Callable[[TgiError], bytes], end: bytes = b""
) -> None:
    """An answer as a stream of events: what `run` writes, or up to where it fails, and what `fail` says of that."""
    connection = call.connection
    await connection.start_events(call.stream_headers(len(chat.plan.prompt)))
    call.streams += chat.generations
    try:
        await run()
    except TgiError as error:
        call.fail(error)
        await connection.write(fail(error))
    await connection.end_events(end)
