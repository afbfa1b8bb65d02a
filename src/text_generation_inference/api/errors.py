"""Failures as clients see them: TGI's body on native routes, OpenAI's on `/v1`. `error_shapes` has others."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from text_generation_inference.api.bodies import ErrorResponse
from text_generation_inference.api.http import HttpError, Response, json_response, text_response
from text_generation_inference.api.openai_bodies import OpenaiError, OpenaiErrorResponse
from text_generation_inference.errors import (
    ContextLengthError,
    EngineError,
    OverloadedError,
    RequestError,
    TemplateError,
    TgiError,
    ValidationError,
)

Body = TypeVar("Body")
RETRY_AFTER = {"retry-after": "1"}


class ToolError(TgiError):
    """Tools and tool choice do not go together."""

    status = 422
    error_type = "tool_error"


class UnavailableError(TgiError):
    """The server is starting, stopping, or has lost its engine."""

    status = 503
    error_type = "unavailable"


class InternalError(TgiError):
    """A defect of this server."""

    def __init__(self) -> None:
        super().__init__("internal error; the log of the server has the details")


class UnsupportedError(TgiError):
    """A field of OpenAI's that this server does not have."""

    status = 400
    error_type = "validation"

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


class NotStoredError(TgiError):
    """Something is asked for by an id that is not known, or no longer."""

    error_type = "validation"

    def __init__(self, status: int, text: str, param: str | None, code: str | None) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code


class BodyError(HttpError):
    """A body that does not fit its struct."""

    def __init__(self, status: int, text: str, field: str | None, code: str) -> None:
        super().__init__(status, text, field=field)
        self.code = code


_PREFIXES: dict[type[TgiError], str] = {
    ValidationError: "Input validation error: ",
    ContextLengthError: "Input validation error: ",
    TemplateError: "Template error: ",
    ToolError: "Tool error: ",
    RequestError: "Request failed during generation: ",
}
_OPENAI_TYPES = {429: "rate_limit_error"}


def describe(error: TgiError) -> ErrorResponse:
    """Text and kind as TGI gives them."""
    if isinstance(error, OverloadedError):
        return ErrorResponse("Model is overloaded", "overloaded")
    if isinstance(error, EngineError):
        return ErrorResponse(f"Request failed during generation: {error}", "generation")
    text = str(error)
    prefix = _PREFIXES.get(type(error), "")
    return ErrorResponse(text if text.startswith(prefix) else prefix + text, error.error_type)


def status_of(error: TgiError) -> int:
    return 424 if isinstance(error, EngineError) else error.status


def native_error(error: TgiError) -> Response:
    status = status_of(error)
    return json_response(describe(error), status, RETRY_AFTER if status in (429, 503) else None)


def openai_status(error: TgiError) -> int:
    """OpenAI says 400 where TGI says 422, and 5xx for what is the server's fault."""
    status = status_of(error)
    return {422: 400, 424: 500}.get(status, status)


def openai_error(error: TgiError, path: str) -> Response:
    status = openai_status(error)
    body = OpenaiErrorResponse(openai_object(error, status, path))
    return json_response(body, status, RETRY_AFTER if status in (429, 503) else None)


def openai_event(error: TgiError, path: str) -> dict[str, object]:
    """The error as an event of a stream that has begun, with TGI's status in it."""
    inner = msgspec.to_builtins(openai_object(error, openai_status(error), path))
    return {"error": {**inner, "http_status_code": status_of(error)}}


# What the Responses API calls otherwise than the chat route.
_RESPONSE_NAMES = (
    ("`messages", "`input"),
    ("`max_tokens`", "`max_output_tokens`"),
    ("`response_format`", "`text.format`"),
)


def openai_object(error: TgiError, status: int, path: str) -> OpenaiError:
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    is_response = path.startswith("/v1/responses")
    prompt = "prompt" if path == "/v1/completions" else "input" if is_response else "messages"
    if isinstance(error, ContextLengthError):
        return OpenaiError(_context_length(error, prompt), kind, prompt, "context_length_exceeded")
    if isinstance(error, NotStoredError):
        return OpenaiError(str(error), kind, error.param, error.code)
    text = describe(error).error
    names = (("`inputs`", f"`{prompt}`"), ("`max_new_tokens`", "`max_tokens`"))
    for native, ours in (*names, *_RESPONSE_NAMES) if is_response else names:
        text = text.replace(native, ours)
    code = describe(error).error_type if status >= 429 else None
    return OpenaiError(text, kind, _param_of(error, text), code)


def _context_length(error: ContextLengthError, prompt: str) -> str:
    """In OpenAI's words, which clients look for."""
    start = f"This model's maximum context length is {error.limit} tokens. However, "
    if error.num_new is None:
        return f"{start}your {prompt} resulted in {error.num_input} tokens. Please reduce the length of the {prompt}."
    return (
        f"{start}you requested {error.num_input + error.num_new} tokens ({error.num_input} in the {prompt},"
        f" {error.num_new} in the completion). Please reduce the length of the {prompt} or completion."
    )


def _param_of(error: TgiError, text: str) -> str | None:
    """The field an error names first, in backticks."""
    if isinstance(error, UnsupportedError):
        return error.param
    if not isinstance(error, ValidationError):
        return None
    return first_name(text.removeprefix(_PREFIXES[ValidationError]).removeprefix("tokenizer error "))


def first_name(text: str) -> str | None:
    """The field that a text begins with, in backticks."""
    parts = text.split("`")
    return parts[1] if len(parts) >= 3 and not parts[0].strip() else None


def openai_plain(status: int, message: str, code: str | None = None, param: str | None = None) -> Response:
    error = OpenaiError(message, "invalid_request_error", param, code)
    return json_response(OpenaiErrorResponse(error), status)


def decode_body(decode: Callable[[bytes], Body], data: bytes) -> Body:
    """The body as a struct. Raises `HttpError` that says what is wrong with it."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise decode_error(error) from None


def decode_error(error: Exception) -> HttpError:
    """What was wrong with a body that does not fit its struct."""
    if isinstance(error, RecursionError):
        return HttpError(400, "Failed to parse the request body as JSON: recursion limit exceeded")
    if not isinstance(error, msgspec.ValidationError):
        return HttpError(400, f"Failed to parse the request body as JSON: {error}")
    detail, _, place = str(error).partition(" - at `")
    path = place.rstrip("`").removeprefix("$").removeprefix(".")
    field, code = path or first_name(detail), "invalid_value"
    if ", got `" in detail:
        code = "invalid_type"
    if detail.startswith("Object missing required field "):
        name = detail.removeprefix("Object missing required field ")
        detail, code = "missing field " + name, "missing_required_parameter"
        field = f"{path}.{name.strip('`')}".lstrip(".")
    where = f"{path}: " if path else ""
    text = f"Failed to deserialize the JSON body into the target type: {where}{detail}"
    return BodyError(422, text, field, code)


def plain_error(error: HttpError, openai: bool) -> Response:
    if not openai:
        return text_response(error.status, error.text, error.headers)
    status = 400 if error.status == 422 else error.status
    code, param = (error.code, error.field) if isinstance(error, BodyError) else (None, None)
    response = openai_plain(status, error.text, code, param)
    response.headers = error.headers
    return response
