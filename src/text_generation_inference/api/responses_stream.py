"""A chat answer as the events of OpenAI's Responses API, numbered without gaps.

The usual one, more of a text, is put together from bytes made once per item.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from text_generation_inference.api.chat_answer import ToldTokens, logprob_of
from text_generation_inference.api.chat_events import AnswerEvent, AnswerPart, PartBegin, PartDelta
from text_generation_inference.api.error_shapes import response_error_event
from text_generation_inference.api.errors import openai_object, openai_status
from text_generation_inference.api.generation import Piece
from text_generation_inference.api.http import named_frame
from text_generation_inference.api.openai_bodies import ChatCompletionLogprob
from text_generation_inference.api.responses_answer import RunningResponse, new_item_id
from text_generation_inference.api.responses_bodies import (
    MessageItem,
    OutputItem,
    OutputTextPart,
    ReasoningItem,
    ResponseFailure,
    ResponsesAnswer,
    SummaryTextPart,
)
from text_generation_inference.errors import TgiError

_encode = msgspec.json.Encoder().encode
_MARK = secrets.token_hex(16)  # stands for the text while an event is taken apart; nobody can send it
_NO_LOGPROBS = b"[]"


class ResponsesWriter:
    def __init__(self, running: RunningResponse, path: str) -> None:
        self._running, self._path = running, path
        self._tokens = ToldTokens(running.chat)
        self._number = 0  # of the next event
        self._output: list[OutputItem] = []
        self._part: PartBegin | None = None  # the one that is open
        self._id = ""  # of its item
        self._texts: list[str] = []
        self._logprobs: list[ChatCompletionLogprob] = []  # of the part
        self._untold: list[ChatCompletionLogprob] = []  # of tokens whose text is still held back
        self._before = self._between = b""  # around the text of a delta, up to the number

    # -- events ----------------------------------------------------------------------------------------------------

    def begin(self) -> bytes:
        return self._response("response.created") + self._response("response.in_progress")

    def text(self, text: str) -> bytes:
        opened = self._open(PartBegin("text")) if self._part is None else b""
        return opened + self._more(text)

    def tell(self, events: Sequence[AnswerEvent], piece: Piece) -> bytes:
        chat = self._running.chat
        if chat.body.logprobs and self._tokens.tells(piece):
            self._untold.append(logprob_of(chat, piece))
        frames: list[bytes] = []
        for place, event in enumerate(events):
            match event:
                case PartBegin():
                    frames.append(self._open(event))
                case PartDelta(text=text):
                    frames.append(self._more(text))
                case _:
                    frames.append(self._close(is_last=piece.last and place + 1 == len(events)))
        return b"".join(frames)

    def finish(self, num_calls: int) -> bytes:
        frames: list[bytes] = []
        if self._part is None and not self._output:  # an answer without a word
            frames.append(self._open(PartBegin("text")))
        frames.append(self._close(is_last=True))
        answer = self._running.complete(self._output)
        self._running.keep(answer)
        frames.append(self._response(f"response.{answer.status}", answer))
        return b"".join(frames)

    def fail(self, error: TgiError) -> bytes:
        told = openai_object(error, openai_status(error), self._path)
        event = response_error_event(error, self._path, self._next())
        answer = self._running.begun()
        answer.status, answer.output = "failed", self._output
        code = "rate_limit_exceeded" if told.type == "rate_limit_error" else "server_error"
        answer.error = ResponseFailure(code, told.message)
        return event + self._response("response.failed", answer)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _open(self, part: PartBegin) -> bytes:
        self._part, self._texts, self._logprobs = part, [], []
        self._id = new_item_id(part.kind)
        place: dict[str, Any] = {"item_id": self._id, "output_index": len(self._output)}
        empty = self._running.item(AnswerPart(part.kind, "", part.id, part.name), self._id, "in_progress")
        added = b""
        match empty:
            case MessageItem():
                empty.content = []
                place["content_index"] = 0
                delta = "response.output_text.delta"
            case ReasoningItem():
                empty.summary = []
                empty.content = msgspec.UNSET
                summary = self._running.tells_summaries
                place["summary_index" if summary else "content_index"] = 0
                delta = "response.reasoning_summary_text.delta" if summary else "response.reasoning_text.delta"
            case _:
                delta = "response.function_call_arguments.delta"
        item = self._event("response.output_item.added", output_index=len(self._output), item=empty)
        if part.kind == "text":
            added = self._event("response.content_part.added", **place, part=OutputTextPart(""))
        elif "summary_index" in place:
            added = self._event("response.reasoning_summary_part.added", **place, part=SummaryTextPart(""))
        more = b"event: " + delta.encode() + b"\ndata: " + _encode({"type": delta, **place, "delta": _MARK})
        self._before, self._between = more.split(_encode(_MARK))
        self._between = self._between.removesuffix(b"}")
        return item + added

    def _more(self, text: str) -> bytes:
        self._texts.append(text)
        assert self._part is not None
        logprobs = b""
        if self._part.kind == "text":
            logprobs = b',"logprobs":' + (self._take_logprobs() if self._untold else _NO_LOGPROBS)
        number = b',"sequence_number":%d}\n\n' % self._next()
        return self._before + _encode(text) + self._between + logprobs + number

    def _take_logprobs(self) -> bytes:
        told, self._untold = self._untold, []
        self._logprobs += told
        return _encode(told)

    def _close(self, is_last: bool) -> bytes:
        part, self._part = self._part, None
        if part is None:
            return b""
        is_cut = is_last and self._running.generation.finish_reason == "length"
        text = "".join(self._texts)
        if part.kind == "text":
            self._take_logprobs()
        whole = AnswerPart(part.kind, text, part.id, part.name)
        item = self._running.item(whole, self._id, "incomplete" if is_cut else "completed", self._logprobs)
        place: dict[str, Any] = {"item_id": self._id, "output_index": len(self._output)}
        match item:
            case MessageItem(content=[told]):
                place["content_index"] = 0
                done = self._event("response.output_text.done", **place, text=text, logprobs=told.logprobs)
                done += self._event("response.content_part.done", **place, part=told)
            case ReasoningItem(summary=[told]):
                place["summary_index"] = 0
                done = self._event("response.reasoning_summary_text.done", **place, text=text)
                done += self._event("response.reasoning_summary_part.done", **place, part=told)
            case ReasoningItem():
                done = self._event("response.reasoning_text.done", **place, content_index=0, text=text)
            case _:
                done = self._event("response.function_call_arguments.done", **place, name=part.name, arguments=text)
        done += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return done

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _response(self, kind: str, answer: ResponsesAnswer | None = None) -> bytes:
        return self._event(kind, response=answer or self._running.begun())

    def _event(self, kind: str, **members: Any) -> bytes:
        return named_frame(kind, {"type": kind, **members, "sequence_number": self._next()})

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number
