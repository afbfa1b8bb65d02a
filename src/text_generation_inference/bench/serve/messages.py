"""What the command and its client processes tell each other.

Plain data. Moments are seconds of the monotonic clock, which the processes of a machine share.
"""

import msgspec

from text_generation_inference.bench.serve.client import Address


class Settings(msgspec.Struct, tag=True, kw_only=True):
    """First word to a client process."""

    address: Address
    api: str
    timeout_s: float


class EncodedRequest(msgspec.Struct, array_like=True):
    number: int
    data: bytes  # as it goes over the wire


class StartPhase(msgspec.Struct, tag=True, kw_only=True):
    """A phase: either `users`, each with one request at a time, or requests that are due at given moments."""

    users: int = 0
    due: list[float] = []  # seconds from the start
    seconds: float | None = None  # users send nothing after it; None: until the requests are used up
    requests: list[EncodedRequest] = []
    has_all: bool = False  # no further requests will come


class Go(msgspec.Struct, tag=True):
    at: float


class More(msgspec.Struct, tag=True):
    """Requests for users."""

    requests: list[EncodedRequest]
    has_all: bool


class Cut(msgspec.Struct, tag=True):
    """End the phase now."""


ToClient = Settings | StartPhase | Go | More | Cut


class ClientReady(msgspec.Struct, tag=True):
    pass


class Need(msgspec.Struct, tag=True):
    """So many more requests, soon."""

    count: int


class Outcome(msgspec.Struct, array_like=True):
    """One request. Without `end` it was still running when its phase was."""

    number: int
    planned: float
    sent: float
    end: float | None
    times: bytes  # doubles: when each event with a token came
    num_generated: int | None  # tokens as the server counts them
    num_prompt: int | None
    error: str | None


class Outcomes(msgspec.Struct, tag=True):
    outcomes: list[Outcome]
    num_tokens: int  # received so far in this phase, for the progress line


class Finished(msgspec.Struct, tag=True, kw_only=True):
    """The phase is over here."""

    started: float
    ended: float
    cpu_seconds: float
    lags: bytes  # doubles: how late timers were, in seconds
    starved_seconds: float  # in which a user had no request to send


FromClient = ClientReady | Need | Outcomes | Finished
