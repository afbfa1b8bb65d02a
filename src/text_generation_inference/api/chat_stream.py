"""A chat answer as OpenAI's stream of chunks.

The usual chunk, a piece of text and nothing else, is put together from bytes made once per choice. Every delta
has a role, and each that holds no tool call a `content` that is a string, the last one too: clients written for TGI
append it unseen.
"""

import secrets
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_answer import ToldTokens, finish_of, logprob_of
from text_generation_inference.api.chat_events import AnswerEvent, PartBegin, PartDelta, stream_answer, stream_events
from text_generation_inference.api.chat_run import Chat
from text_generation_inference.api.choices import run_together, usage_of
from text_generation_inference.api.errors import openai_event
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.http import DONE, frame
from text_generation_inference.api.older_calls import older_delta, wants_older
from text_generation_inference.api.openai_bodies import (
    ChatCompletionChoice,
    ChatCompletionChunk,
    ChatCompletionDelta,
    ChatCompletionLogprobs,
    DeltaToolCall,
    Function,
    Usage,
)

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # stands for the text while a chunk is taken apart; nobody can send it


async def stream_chat(call: Call, chat: Chat) -> None:
    async def run() -> None:
        runs = [
            stream_answer(call, chat, generation, _ChunkWriter(call, chat, index, generation))
            for index, generation in enumerate(chat.generations)
        ]
        if len(runs) == 1:
            await runs[0]
        else:
            await run_together(runs)
        if _wants_usage(chat):
            usage = usage_of(call.service, chat.generations, thinks=chat.plan.reasoning is not None)
            await call.connection.write(frame(_chunk(call, chat, [], usage)))

    await stream_events(call, chat, run, lambda error: frame(openai_event(error, call.request.path)), DONE)


def _wants_usage(chat: Chat) -> bool:
    return chat.body.stream_options is not None and chat.body.stream_options.include_usage


def _chunk(
    call: Call, chat: Chat, choices: list[ChatCompletionChoice], usage: Usage | None = None
) -> ChatCompletionChunk:
    shown = usage if _wants_usage(chat) else UNSET
    return ChatCompletionChunk(chat.id, chat.created, chat.model, call.service.fingerprint, choices, shown)


class _ChunkWriter:
    """One choice as chunks."""

    def __init__(self, call: Call, chat: Chat, index: int, generation: Generation) -> None:
        self._call, self._chat, self._index, self._generation = call, chat, index, generation
        self._tokens = ToldTokens(chat)
        plain = self._frame(ChatCompletionDelta(content=_MARK))
        self._before, self._after = plain.split(_encode(_MARK))

    def begin(self) -> bytes:
        return self._frame(ChatCompletionDelta(content=""))

    def text(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def tell(self, events: Sequence[AnswerEvent], piece: Piece) -> bytes:
        """The log-probability of the token goes with the first chunk."""
        deltas = [delta for event in events if (delta := _delta(event)) is not None]
        logprobs = None
        if self._chat.body.logprobs and self._tokens.tells(piece):
            logprobs = ChatCompletionLogprobs([logprob_of(self._chat, piece)])
            deltas = deltas or [ChatCompletionDelta(content="")]
        return b"".join(self._frame(delta, None if number else logprobs) for number, delta in enumerate(deltas))

    def finish(self, num_calls: int) -> bytes:
        last = ChatCompletionDelta(content="")
        return self._frame(last, finish=finish_of(self._chat, self._generation, num_calls > 0))

    def _frame(
        self, delta: ChatCompletionDelta, logprobs: ChatCompletionLogprobs | None = None, finish: str | None = None
    ) -> bytes:
        if wants_older(self._chat.body):
            older_delta(delta)
        choice = ChatCompletionChoice(self._index, delta, logprobs, finish)
        return frame(_chunk(self._call, self._chat, [choice]))


def _delta(event: AnswerEvent) -> ChatCompletionDelta | None:
    """Chunks have no ends of parts, and a beginning only of calls."""
    match event:
        case PartDelta(kind="text", text=text):
            return ChatCompletionDelta(content=text)
        case PartDelta(kind="thoughts", text=text):
            return ChatCompletionDelta(content="", reasoning_content=text, reasoning=text)
        case PartDelta(index=index, text=text):
            return ChatCompletionDelta(tool_calls=[DeltaToolCall(index, UNSET, UNSET, Function(UNSET, text))])
        case PartBegin(kind="call", index=index, id=number, name=name):
            return ChatCompletionDelta(tool_calls=[DeltaToolCall(index, number, "function", Function(name, ""))])
        case _:
            return None
