"""A chat answer as OpenAI's stream of chunks.

The usual chunk, a piece of text and nothing else, is put together from bytes made once per choice. Every delta
has a role, and each that holds no tool call a `content` that is a string, the last one too: clients written for TGI
append it unseen.
"""

import secrets

import msgspec
from msgspec import UNSET

from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_answer import Chat, ToldTokens, finish_of, logprob_of
from text_generation_inference.api.choices import run_together, usage_of
from text_generation_inference.api.errors import openai_event
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.http import DONE, KEEP_ALIVE, frame
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
from text_generation_inference.errors import TgiError
from text_generation_inference.text.tools import CallArguments, CallStart, Content

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # stands for the text while a chunk is taken apart; nobody can send it


async def stream_chat(call: Call, chat: Chat) -> None:
    connection = call.connection
    await connection.start_events(call.stream_headers(len(chat.plan.prompt)))
    call.streams += chat.generations
    try:
        choices = [_ChoiceStream(call, chat, index, generation) for index, generation in enumerate(chat.generations)]
        if len(choices) == 1:
            await choices[0].run()
        else:
            await run_together([choice.run() for choice in choices])
        if _wants_usage(chat):
            usage = usage_of(call.service, chat.generations, thinks=chat.plan.reasoning is not None)
            await connection.write(frame(_chunk(call, chat, [], usage)))
    except TgiError as error:
        call.fail(error)
        await connection.write(frame(openai_event(error, call.request.path)))
    await connection.end_events(DONE)


def _wants_usage(chat: Chat) -> bool:
    return chat.body.stream_options is not None and chat.body.stream_options.include_usage


def _chunk(
    call: Call, chat: Chat, choices: list[ChatCompletionChoice], usage: Usage | None = None
) -> ChatCompletionChunk:
    shown = usage if _wants_usage(chat) else UNSET
    return ChatCompletionChunk(chat.id, chat.created, chat.model, call.service.fingerprint, choices, shown)


class _ChoiceStream:
    """One choice on its way to the client."""

    def __init__(self, call: Call, chat: Chat, index: int, generation: Generation) -> None:
        self._call, self._chat, self._index, self._generation = call, chat, index, generation
        self._parser = chat.parser()
        self._tokens = ToldTokens(chat)
        self._calls: list[str] = []  # ids
        plain = self._frame(ChatCompletionDelta(content=_MARK))
        self._before, self._after = plain.split(_encode(_MARK))

    async def run(self) -> None:
        connection, generation = self._call.connection, self._generation
        await connection.write(self._frame(ChatCompletionDelta(content="")))
        plain = self._parser is None and self._chat.plan.reasoning is None and not self._chat.body.logprobs
        while not generation.finish_reason:
            pieces = await generation.take()
            if not pieces:
                await connection.write(KEEP_ALIVE)
                continue
            if plain:
                frames = [self._before + _encode(piece.text) + self._after for piece in pieces if piece.text]
            else:
                frames = [data for piece in pieces for data in self._frames(piece)]
            if generation.finish_reason:
                last = ChatCompletionDelta(content="")
                frames.append(self._frame(last, finish=finish_of(self._chat, generation, bool(self._calls))))
            if frames:
                await connection.write(b"".join(frames))
        self._call.succeed(generation)

    def _frames(self, piece: Piece) -> list[bytes]:
        logprobs = None
        if self._chat.body.logprobs and self._tokens.tells(piece):
            logprobs = ChatCompletionLogprobs([logprob_of(self._chat, piece)])
        thoughts, text = self._chat.told(piece)
        parts = [Content(text)] if text else []
        if self._parser is not None:
            parts = self._parser.push(text)
            if piece.last:
                parts += self._parser.finish(cut=self._generation.finish_reason == "length")
        if not parts and not thoughts and logprobs is not None:
            parts = [Content("")]
        frames: list[bytes] = []
        if thoughts:
            delta = ChatCompletionDelta(content="", reasoning_content=thoughts, reasoning=thoughts)
            frames.append(self._frame(delta, logprobs))
            logprobs = None
        for part in filter(self._chat.keeps, parts):
            match part:
                case Content(text=text):
                    delta = ChatCompletionDelta(content=text)
                case CallStart(index=number, name=name):
                    self._calls.append(self._chat.new_call_id(name, number))
                    delta = _tool_delta(DeltaToolCall(number, self._calls[-1], "function", Function(name, "")))
                case CallArguments(index=number, text=text):
                    delta = _tool_delta(DeltaToolCall(number, UNSET, UNSET, Function(UNSET, text)))
            frames.append(self._frame(delta, logprobs))
            logprobs = None
        return frames

    def _frame(
        self, delta: ChatCompletionDelta, logprobs: ChatCompletionLogprobs | None = None, finish: str | None = None
    ) -> bytes:
        if wants_older(self._chat.body):
            older_delta(delta)
        choice = ChatCompletionChoice(self._index, delta, logprobs, finish)
        return frame(_chunk(self._call, self._chat, [choice]))


def _tool_delta(call: DeltaToolCall) -> ChatCompletionDelta:
    return ChatCompletionDelta(tool_calls=[call])
