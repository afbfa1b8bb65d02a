"""Failures as clients see them: TGI's body on native routes, OpenAI's on `/v1`.

Level 8.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from tgi.api.bodies import ErrorResponse
from tgi.api.http import HttpError, Response, json_response, text_response
from tgi.api.openai_bodies import OpenaiError, OpenaiErrorResponse
from tgi.errors import EngineError, OverloadedError, RequestError, TemplateError, TgiError, ValidationError

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


_PREFIXES = {
    ValidationError: "Input validation error: ",
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


def openai_error(error: TgiError) -> Response:
    status = openai_status(error)
    body = OpenaiErrorResponse(_openai_object(error, status))
    return json_response(body, status, RETRY_AFTER if status in (429, 503) else None)


def openai_event(error: TgiError) -> dict[str, object]:
    """The error as an event of a stream that has begun, with TGI's status in it."""
    inner = msgspec.to_builtins(_openai_object(error, openai_status(error)))
    return {"error": {**inner, "http_status_code": status_of(error)}}


def _openai_object(error: TgiError, status: int) -> OpenaiError:
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = describe(error).error_type if status >= 429 else None
    return OpenaiError(describe(error).error, kind, _param_of(error), code)


def _param_of(error: TgiError) -> str | None:
    """The field an error names first, in backticks."""
    if isinstance(error, UnsupportedError):
        return error.param
    parts = str(error).split("`")
    if not isinstance(error, ValidationError) or len(parts) < 3 or parts[0].strip():
        return None
    return None if parts[1] in ("inputs", "max_new_tokens") else parts[1]  # names of the native routes


def openai_plain(status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> Response:
    return json_response(OpenaiErrorResponse(OpenaiError(message, kind, None, code)), status)


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
    field = path
    if detail.startswith("Object missing required field "):
        missing = detail.removeprefix("Object missing required field ")
        detail = "missing field " + missing
        field = f"{path}.{missing.strip('`')}".removeprefix(".")
    where = f"{path}: " if path else ""
    return HttpError(
        422, f"Failed to deserialize the JSON body into the target type: {where}{detail}", field=field or None
    )


def plain_error(error: HttpError, openai: bool) -> Response:
    if not openai:
        return text_response(error.status, error.text, error.headers)
    status = 400 if error.status == 422 else error.status
    response = openai_plain(status, error.text)
    response.headers = error.headers
    return response
