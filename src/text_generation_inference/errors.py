"""Every failure the project can report, each with its scope.

A *caller* error is raised before the engine sees a request (HTTP 4xx). A *request* error ends one request.
An *engine* error ends the engine. A *start* error means the server or `LLM` cannot come up: its text names the cause
and the way out.
"""


class TgiError(Exception):
    """Base of all errors with a text meant for the user."""

    status = 500
    error_type = "internal"


class ValidationError(TgiError):
    """The caller asked for something that cannot be served. Text as TGI prints it after `Input validation error: `."""

    status = 422
    error_type = "validation"


def too_many_pictures(most: int) -> ValidationError:
    """Of a prompt. Told as soon as they are counted, before anything is made of each of them."""
    return ValidationError(f"At most {most} image(s) may be provided in one prompt.")


class ContextLengthError(ValidationError):
    """Prompt and answer do not fit into what the model can take."""

    def __init__(self, text: str, limit: int, num_input: int, num_new: int | None) -> None:
        """`num_new` is None where the prompt alone is too long."""
        super().__init__(text)
        self.limit, self.num_input, self.num_new = limit, num_input, num_new


class TemplateError(TgiError):
    """The chat template is missing, does not compile, or refused the messages."""

    status = 422
    error_type = "template_error"


class OverloadedError(TgiError):
    """More requests than `max_concurrent_requests`."""

    status = 429
    error_type = "overloaded"


class RequestError(TgiError):
    """One request failed while it ran; its neighbours go on."""

    status = 424
    error_type = "generation"


class SlowClientError(TgiError):
    """A client did not take what was generated for it; only its own request ends."""

    status = 503
    error_type = "slow_client"


class DeadlineError(TgiError):
    """A request took longer than `request_timeout_s`."""

    status = 504
    error_type = "timeout"


class IncompleteError(TgiError):
    """A generation ended without a word why."""

    error_type = "incomplete_generation"


class EngineError(TgiError):
    """The engine cannot go on; every request in flight ends with this."""

    status = 500
    error_type = "engine"


class StartError(TgiError):
    """The model or server cannot start."""

    error_type = "start"


class ModelNotFoundError(StartError):
    """No such model: neither embedded, nor a path, nor on the hub."""


class ModelFormatError(StartError):
    """A model file is truncated, corrupt, unsupported or incomplete."""


class ResourceError(StartError):
    """Not enough disk or memory for what was asked."""
