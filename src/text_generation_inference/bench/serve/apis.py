"""The three streaming APIs that can be measured: what a request says, and what the events of its answer mean.

`generate` is TGI's own `/generate_stream`; `completions` and `chat` are OpenAI's. Knows no sockets. An event
is decoded into the few members that matter here, so a token costs about a microsecond.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

PATHS = {"generate": "/generate_stream", "completions": "/v1/completions", "chat": "/v1/chat/completions"}
_MOST_ERROR_TEXT = 200

Message = dict[str, str]  # role and content
_encode = msgspec.json.Encoder().encode


class StreamedAnswer:
    """What has come of one answer so far."""

    __slots__ = ("error", "is_finished", "num_generated", "num_prompt", "times")

    def __init__(self) -> None:
        self.times: array[float] = array("d")  # when each event with a token came
        self.is_finished = False
        self.num_generated: int | None = None  # tokens, as the server counts them
        self.num_prompt: int | None = None
        self.error: str | None = None


ReadEvent = Callable[[bytes, StreamedAnswer, float], None]


class ApiCall(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a run have in common."""

    api: str
    model: str | None  # sent by the OpenAI APIs
    ignore_eos: bool = False

    def body(self, prompt: str | Sequence[Message], max_new_tokens: int) -> bytes:
        """Greedy, streamed, with the server's own counts at the end."""
        if self.api == "generate":
            parameters = {"max_new_tokens": max_new_tokens, "do_sample": False, "details": True}
            return _encode({"inputs": as_text(prompt), "parameters": parameters})
        fields: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        if self.api == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        else:
            fields["prompt"] = as_text(prompt)
        fields |= {"max_tokens": max_new_tokens, "temperature": 0.0, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return _encode(fields)

    def read_event(self) -> ReadEvent:
        return _read_native if self.api == "generate" else _read_openai


def as_text(prompt: str | Sequence[Message]) -> str:
    """A conversation for a model without chat template: its texts, one per line."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


# -- events --------------------------------------------------------------------------------------------------------


class _StreamDetails(msgspec.Struct):
    generated_tokens: int
    input_length: int | None = None


class _Token(msgspec.Struct):
    """There is one; nothing else of it matters."""


class _NativeEvent(msgspec.Struct):
    token: _Token | None = None
    generated_text: str | None = None
    details: _StreamDetails | None = None
    error: Any = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _OpenaiEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decode_native = msgspec.json.Decoder(_NativeEvent).decode
_decode_openai = msgspec.json.Decoder(_OpenaiEvent).decode


def _read_native(payload: bytes, answer: StreamedAnswer, now: float) -> None:
    try:
        event = _decode_native(payload)
    except msgspec.DecodeError:
        answer.error = answer.error or f"unreadable event: {_shorten(payload.decode(errors='replace'))}"
        return
    if event.token is not None:
        answer.times.append(now)
        if event.generated_text is not None:
            answer.is_finished = True
            if event.details is not None:
                answer.num_generated, answer.num_prompt = event.details.generated_tokens, event.details.input_length
    elif event.error is not None:
        answer.error = f"error in the stream: {describe_error(event.error)}"


def _read_openai(payload: bytes, answer: StreamedAnswer, now: float) -> None:
    try:
        event = _decode_openai(payload)
    except msgspec.DecodeError:
        if payload.strip() == b"[DONE]":
            answer.is_finished = True
        else:
            answer.error = answer.error or f"unreadable event: {_shorten(payload.decode(errors='replace'))}"
        return
    for choice in event.choices:
        delta = choice.delta
        if choice.text or (delta is not None and (delta.content or delta.reasoning_content or delta.reasoning)):
            answer.times.append(now)
        if choice.finish_reason is not None:
            answer.is_finished = True
    if event.usage is not None and event.usage.completion_tokens is not None:
        answer.num_generated, answer.num_prompt = event.usage.completion_tokens, event.usage.prompt_tokens
    if event.error is not None:
        answer.error = f"error in the stream: {describe_error(event.error)}"
    elif event.object == "error":
        answer.error = f"error in the stream: {_shorten(event.message or '')}"


def describe_error(error: Any) -> str:
    """The text of TGI's `error`, of OpenAI's `error.message`, or of whatever else there is."""
    if isinstance(error, dict):
        error = error.get("message", error)
    return _shorten(error if isinstance(error, str) else _encode(error).decode())


def describe_body(body: bytes) -> str:
    """What an answer with a bad status says."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _shorten(body.decode(errors="replace"))
    if isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), found)
    return describe_error(found)


def _shorten(text: str) -> str:
    """One line that can be counted."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_ERROR_TEXT else f"{line[: _MOST_ERROR_TEXT - 1]}…"
