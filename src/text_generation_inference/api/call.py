"""One call of a route: the request, the way back, and what the routes share."""

import logging
from dataclasses import dataclass, field
from typing import TypeVar

from text_generation_inference.api.errors import UnavailableError, decode_body, describe
from text_generation_inference.api.generation import Generation
from text_generation_inference.api.http import Connection, HttpRequest
from text_generation_inference.api.logs import log_success, span_fields
from text_generation_inference.api.metrics import Timings
from text_generation_inference.api.refusals import field_of, log_refusal
from text_generation_inference.api.service import Service
from text_generation_inference.api.trace import Span
from text_generation_inference.api.unknown_fields import BodyForm
from text_generation_inference.errors import DeadlineError, EngineError, OverloadedError, TgiError

Body = TypeVar("Body")
# Kinds of errors that TGI counts, by the label it gives them.
_COUNTED = {
    "validation": "validation",
    "overloaded": "overloaded",
    "generation": "generation",
    "template_error": "template",
    "incomplete_generation": "incomplete",
    "timeout": "timeout",
}
# Other texts may repeat what the client sent.
_WITHOUT_USER_TEXT = (DeadlineError, EngineError, OverloadedError, UnavailableError)


@dataclass(slots=True, eq=False)
class Call:
    service: Service
    request: HttpRequest
    connection: Connection
    span: Span
    name: str  # of the span
    route: str  # its path in the table of routes
    streams: list[Generation] = field(default_factory=list)  # woken when the connection has been silent for long

    async def read_body(self, form: BodyForm[Body], of_any_type: bool = False) -> Body:
        """The JSON body. Fields that nobody knows are noted and otherwise ignored."""
        data = await self.request.read_json(of_any_type)
        body = decode_body(form.decode, data)
        self.service.unknown_fields.note(form.unknown_names(data))
        return body

    def succeed(self, generation: Generation) -> None:
        """A generation came to its end: count it, and say so in the log."""
        timings = generation.timings
        assert timings is not None
        self.service.metrics.succeed(timings)
        self.service.live.end(generation, self.route, self.request.id)
        self.span.set(**span_fields(timings, generation.seed))
        log_success(timings, generation.seed, self.request.id, self.name)

    def fail(self, error: TgiError, status: int = 0) -> None:
        """Count and log a failure that the client is told of with this status, or inside a stream that has begun."""
        kind = describe(error).error_type
        self.span.fail(kind)
        if kind in _COUNTED:
            self.service.metrics.fail_request(_COUNTED[kind])
        self.service.live.fail(self.route, self.request.id, kind, self.connection.status or status)
        log_refusal(
            self.request.id,
            self.route,
            self.connection.status or status,
            field_of(error),
            kind,
            describe(error).error if isinstance(error, _WITHOUT_USER_TEXT) else "Request refused",
            logging.ERROR if kind in ("generation", "internal") else logging.INFO,
        )

    def refuse(self, status: int, field: str | None = None) -> None:
        """Log an answer that is made before there is anything to count: no JSON, a wrong type, too much."""
        self.service.live.fail(self.route, self.request.id, "refused", self.connection.status or status)
        log_refusal(self.request.id, self.route, self.connection.status or status, field)

    def drop(self) -> None:
        """The client left before it had its answer."""
        self.span.fail("dropped")
        self.service.metrics.fail_request("dropped")
        self.service.live.fail(self.route, self.request.id, "dropped", self.connection.status)

    def stream_headers(self, characters: int) -> dict[str, str]:
        return {
            "x-compute-type": self.service.compute_type,
            "x-compute-characters": str(characters),
            "x-accel-buffering": "no",
        }

    def timing_headers(self, characters: int, input_length: int, timings: Timings) -> dict[str, str]:
        def milliseconds(seconds: float) -> str:
            return str(int(seconds * 1000))

        return {
            "x-compute-type": self.service.compute_type,
            "x-compute-time": f"{timings.total_s:.9f}".rstrip("0"),
            "x-compute-characters": str(characters),
            "x-total-time": milliseconds(timings.total_s),
            "x-validation-time": milliseconds(timings.validation_s),
            "x-queue-time": milliseconds(timings.queue_s),
            "x-inference-time": milliseconds(timings.inference_s),
            "x-time-per-token": milliseconds(timings.per_token_s),
            "x-prompt-tokens": str(input_length),
            "x-generated-tokens": str(timings.generated_tokens),
        }
