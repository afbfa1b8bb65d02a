"""Failures in the shape of the API that was called: TGI's own, OpenAI's, its Responses', Anthropic's and Ollama's.

The path says which. A shape answers for a whole request, and for a stream that has begun.
"""

from typing import Protocol

from text_generation_inference.api.errors import (
    RETRY_AFTER,
    describe,
    native_error,
    openai_error,
    openai_event,
    openai_object,
    openai_plain,
    openai_status,
    plain_error,
)
from text_generation_inference.api.http import HttpError, Response, encode_line, frame, json_response, named_frame
from text_generation_inference.api.messages_bodies import MessagesError, MessagesErrorResponse
from text_generation_inference.api.ollama_bodies import OllamaError
from text_generation_inference.errors import ContextLengthError, OverloadedError, TgiError


class ErrorShape(Protocol):
    def failure(self, error: TgiError) -> Response:
        """What a route raised before its answer began."""
        ...

    def event(self, error: TgiError) -> bytes:
        """The same, in a stream that has begun."""
        ...

    def refusal(self, error: HttpError) -> Response:
        """What is wrong with the HTTP request or the form of its body."""
        ...

    def plain(self, status: int, text: str, code: str | None = None) -> Response:
        """No such route, or no leave to call it."""
        ...


def shape_of(path: str, request_id: str) -> ErrorShape:
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return _Anthropic(request_id)
    if path == "/v1/responses" or path.startswith("/v1/responses/"):
        return _Responses(path)
    if path.startswith("/api/"):
        return _Ollama()
    return _Openai(path) if path == "/v1" or path.startswith("/v1/") else _Native()


class _Native:
    def failure(self, error: TgiError) -> Response:
        return native_error(error)

    def event(self, error: TgiError) -> bytes:
        return frame(describe(error))

    def refusal(self, error: HttpError) -> Response:
        return plain_error(error, openai=False)

    def plain(self, status: int, text: str, code: str | None = None) -> Response:
        return Response(status)


class _Openai:
    def __init__(self, path: str) -> None:
        self.path = path

    def failure(self, error: TgiError) -> Response:
        return openai_error(error, self.path)

    def event(self, error: TgiError) -> bytes:
        return frame(openai_event(error, self.path))

    def refusal(self, error: HttpError) -> Response:
        return plain_error(error, openai=True)

    def plain(self, status: int, text: str, code: str | None = None) -> Response:
        return openai_plain(status, text, code)


class _Responses(_Openai):
    """As OpenAI's other routes, but for streams, whose events have types."""

    def event(self, error: TgiError) -> bytes:
        return response_error_event(error, self.path, 0)


def response_error_event(error: TgiError, path: str, number: int) -> bytes:
    """`number`: of the event in its stream."""
    told = openai_object(error, openai_status(error), path)
    value = {"code": told.code or told.type, "message": told.message, "param": told.param, "sequence_number": number}
    return named_frame("error", {"type": "error", **value})


class _Ollama:
    def failure(self, error: TgiError) -> Response:
        status = openai_status(error)
        return json_response(OllamaError(_words(error)), status, RETRY_AFTER if status in (429, 503) else None)

    def event(self, error: TgiError) -> bytes:
        return encode_line(OllamaError(_words(error)))

    def refusal(self, error: HttpError) -> Response:
        return json_response(OllamaError(error.text), 400 if error.status == 422 else error.status, error.headers)

    def plain(self, status: int, text: str, code: str | None = None) -> Response:
        return json_response(OllamaError(text), status)


_OLLAMA_NAMES = (("`repetition_penalty`", "`repeat_penalty`"), ("`max_new_tokens`", "`num_predict`"))


def _words(error: TgiError) -> str:
    text = describe(error).error.removeprefix("Input validation error: ")
    for name, theirs in _OLLAMA_NAMES:
        text = text.replace(name, theirs)
    return text


# -- Anthropic -----------------------------------------------------------------------------------------------------

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# What the chat path calls otherwise.
_NAMES = (
    ("`inputs`", "`messages`"),
    ("`max_new_tokens`", "`max_tokens`"),
    ("`stop`", "`stop_sequences`"),
    ("`response_format`", "`output_config.format`"),
    ("`parameters` of the tool", "`input_schema` of the tool"),
)


class _Anthropic:
    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def failure(self, error: TgiError) -> Response:
        status, text = _told(error)
        headers = RETRY_AFTER if status in (503, 529) else {}
        return self._response(status, text, headers)

    def event(self, error: TgiError) -> bytes:
        status, text = _told(error)
        return named_frame("error", self._body(status, text))

    def refusal(self, error: HttpError) -> Response:
        status = 400 if error.status == 422 else error.status
        return self._response(status, error.text, error.headers)

    def plain(self, status: int, text: str, code: str | None = None) -> Response:
        return self._response(status, text, {})

    def _response(self, status: int, text: str, headers: dict[str, str]) -> Response:
        return json_response(self._body(status, text), status, headers)

    def _body(self, status: int, text: str) -> MessagesErrorResponse:
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return MessagesErrorResponse(MessagesError(kind, text), self._request_id)


def _told(error: TgiError) -> tuple[int, str]:
    """Status and text. Anthropic tells a server with too much to do from a caller who asks for too much."""
    if isinstance(error, OverloadedError):
        return 529, "Overloaded: more requests than the server takes"
    if isinstance(error, ContextLengthError):
        return 400, _too_long(error)
    text = describe(error).error.removeprefix("Input validation error: ")
    for name, ours in _NAMES:
        text = text.replace(name, ours)
    return openai_status(error), text


def _too_long(error: ContextLengthError) -> str:
    """In Anthropic's words, by which clients know that they have to shorten the conversation."""
    if error.num_new is None:
        return f"prompt is too long: {error.num_input} tokens > {error.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.num_input} + {error.num_new} > {error.limit},"
        " decrease input length or `max_tokens` and try again"
    )
