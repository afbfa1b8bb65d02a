"""What the log says of a request that was refused or failed: status, route and field, never what the user wrote.

Texts of errors may repeat a prompt, so a field is named only if it is one of ours.
"""

import logging
import re

import msgspec

from text_generation_inference.api.bodies import GenerateParameters, GenerateRequest
from text_generation_inference.api.errors import UnsupportedError
from text_generation_inference.api.http import HttpError
from text_generation_inference.api.logs import fields
from text_generation_inference.api.messages_bodies import MessagesRequest
from text_generation_inference.api.openai_bodies import ChatRequest, CompletionRequest
from text_generation_inference.api.responses_bodies import ResponsesRequest

log = logging.getLogger("text_generation_inference.api")

_BODIES = (
    GenerateRequest,
    GenerateParameters,
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    ResponsesRequest,
)
_KNOWN = frozenset(field.encode_name for body in _BODIES for field in msgspec.structs.fields(body))
_NAMES = re.compile(r"`([a-z0-9_]+)`")


def field_of(error: Exception) -> str | None:
    """The field that an error is about, as far as it says so."""
    if isinstance(error, HttpError):
        return error.field
    if isinstance(error, UnsupportedError):
        return error.param if error.param in _KNOWN else None
    text = str(error)
    named = (name for name in _NAMES.findall(text) if name in _KNOWN)
    return next(named, "grammar" if text.startswith("grammar is not ") else None)


def log_refusal(
    request_id: str,
    route: str,
    status: int,
    field: str | None = None,
    error_type: str | None = None,
    text: str = "Request refused",
    level: int = logging.INFO,
) -> None:
    """One line. `route` is that of the table, not the path, which is the client's."""
    known = {"error_type": error_type, "field": field}
    given = {name: value for name, value in known.items() if value is not None}
    log.log(level, "%s", text, extra=fields(request_id=request_id, route=route, status=status, **given))
