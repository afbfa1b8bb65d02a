"""A chat answer in the shape of Anthropic's Messages API, whole and as events.

Blocks follow each other and never overlap. The stream begins with the first token: what was cached of the prompt is
known then.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from text_generation_inference.api.chat_events import (
    AnswerEvent,
    AnswerPart,
    PartBegin,
    PartDelta,
    PartEnd,
    PartKind,
    parts_of,
)
from text_generation_inference.api.chat_run import Chat
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.http import named_frame
from text_generation_inference.api.messages_bodies import (
    AnswerBlock,
    InputJsonDelta,
    MessagesAnswer,
    MessagesEnd,
    MessagesEvent,
    MessagesUsage,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # stands for the text while an event is taken apart; nobody can send it
_SIGNATURE = "unsigned"  # clients send it back with the block, which they leave out without one
_PING = named_frame("ping", MessagesEvent(type="ping"))


def messages_answer(chat: Chat, pieces: Sequence[Piece], hides_cached: bool) -> MessagesAnswer:
    generation = chat.generations[0]
    parts = parts_of(chat, generation, pieces)
    calls = any(part.kind == "call" for part in parts)
    return MessagesAnswer(
        id=chat.id,
        model=chat.model,
        content=[_block(part) for part in parts],
        stop_reason=_stop_reason(chat, generation, calls),
        stop_sequence=_stop_sequence(generation),
        usage=_usage(generation, hides_cached),
    )


def _block(part: AnswerPart) -> AnswerBlock:
    match part.kind:
        case "text":
            return TextBlock(part.text)
        case "thoughts":
            return ThinkingBlock(part.text, _SIGNATURE)
        case "call":
            return ToolUseBlock(part.id, part.name, _arguments(part.text))


def _arguments(text: str) -> dict[str, Any]:
    """Of a call that a limit cut off there are none: half an object is no object."""
    try:
        return msgspec.json.decode(text.encode(errors="replace"), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _stop_reason(chat: Chat, generation: Generation, calls: bool) -> StopReason:
    if generation.finish_reason == "length":
        asked = chat.body.max_tokens
        return "max_tokens" if asked is None or generation.num_tokens >= asked else "model_context_window_exceeded"
    if _stop_sequence(generation) is not None:
        return "stop_sequence"
    return "tool_use" if calls else "end_turn"


def _stop_sequence(generation: Generation) -> str | None:
    return generation.text.stop_string or None if generation.finish_reason == "stop_sequence" else None


def _usage(generation: Generation, hides_cached: bool) -> MessagesUsage:
    cached = 0 if hides_cached else generation.num_cached_tokens or 0
    return MessagesUsage(generation.input_length - cached, 0, cached, generation.num_tokens)


class MessagesWriter:
    """An answer as events. The usual one, more of a text, is put together from bytes made once per block."""

    def __init__(self, chat: Chat, hides_cached: bool) -> None:
        self._chat, self._generation, self._hides_cached = chat, chat.generations[0], hides_cached
        self._has_begun = False
        self._index = -1  # of the block that was opened last
        self._open: PartKind | None = None
        self._before = self._after = b""  # of the text in a delta of the open block

    def begin(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        more = self._before + _encode(text) + self._after
        if self._open is not None:
            return more
        opened = self._open_block(PartBegin("text"))
        return opened + self._before + _encode(text) + self._after

    def tell(self, events: Sequence[AnswerEvent], piece: Piece) -> bytes:
        frames: list[bytes] = []
        for event in events:
            match event:
                case PartBegin():
                    frames.append(self._open_block(event))
                case PartDelta(text=text):
                    frames.append(self._before + _encode(text) + self._after)
                case PartEnd():
                    frames.append(self._close_block())
        return b"".join(frames)

    def finish(self, num_calls: int) -> bytes:
        begun = self._start() if not self._has_begun else b""
        generation = self._generation
        delta = StopDelta(_stop_reason(self._chat, generation, num_calls > 0), _stop_sequence(generation))
        end = MessagesEnd(delta, _usage(generation, self._hides_cached))
        frames = [begun, self._close_block(), named_frame("message_delta", end), _event(type="message_stop")]
        return b"".join(frames)

    def _start(self) -> bytes:
        self._has_begun = True
        usage = _usage(self._generation, self._hides_cached)
        usage.output_tokens = 0
        chat = self._chat
        message = MessagesAnswer(
            id=chat.id, model=chat.model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        return _event(type="message_start", message=message) + _PING

    def _open_block(self, part: PartBegin) -> bytes:
        begun = b"" if self._has_begun else self._start()
        self._index += 1
        self._open = part.kind
        match part.kind:
            case "text":
                block, delta = TextBlock(""), TextDelta(_MARK)
            case "thoughts":
                block, delta = ThinkingBlock("", ""), ThinkingDelta(_MARK)
            case "call":
                block, delta = ToolUseBlock(part.id, part.name, {}), InputJsonDelta(_MARK)
        more = _event(type="content_block_delta", index=self._index, delta=delta)
        self._before, self._after = more.split(_encode(_MARK))
        return begun + _event(type="content_block_start", index=self._index, content_block=block)

    def _close_block(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "thoughts":
            signed = _event(type="content_block_delta", index=self._index, delta=SignatureDelta(_SIGNATURE))
        return signed + _event(type="content_block_stop", index=self._index)


def _event(**members: Any) -> bytes:
    return named_frame(members["type"], MessagesEvent(**members))
