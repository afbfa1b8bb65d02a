"""What the two ends of the engine's socket agree on: limits, and what a message must hold to be taken.

Never torch. Whoever can reach the socket may send anything: a message that cannot be read, or that holds what
no request may hold, is dropped or refused, and nobody else notices.
"""

import msgspec

from text_generation_inference.errors import ValidationError
from text_generation_inference.types import (
    MAX_SALT_CHARACTERS,
    MAX_SEED,
    FromEngine,
    GenerationRequest,
    Hello,
    ModelFacts,
    Submit,
    ToEngine,
    TokenOut,
)

HIGH_WATER_MARK = 1_000  # messages that wait in each socket, for each peer
MAX_FROM_ENGINE = 256 * 2**20  # bytes of one message; a step of thousands of rows with all their best tokens has few MB
GRAMMAR_KINDS = ("json", "regex", "lark")
MAX_ID = 2**48  # of a client's own requests: the bits above are the client's number
_LEAST_TO_ENGINE = 16 * 2**20
_TIMES_PAYLOAD = 8  # a grammar made from a body may be larger than the body

encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(ToEngine).decode
_decode_answer = msgspec.msgpack.Decoder(FromEngine).decode


class MalformedMessageError(Exception):
    """A message that means nothing."""


def max_to_engine(payload_limit: int) -> int:
    """Bytes of the largest message that an HTTP body of at most `payload_limit` bytes can become."""
    return _LEAST_TO_ENGINE + _TIMES_PAYLOAD * payload_limit


def decode_to_engine(payload: bytes) -> ToEngine:
    try:
        message = _decode_request(payload)
    except Exception as error:  # nesting, overflow and encodings have errors of their own
        raise MalformedMessageError(f"{type(error).__name__}: {error}") from None
    if isinstance(message, Submit) and not 0 < message.request.id < MAX_ID:
        raise MalformedMessageError("its request id is out of range")
    if isinstance(message, Hello) and not 0 < message.pid < 2**31:
        raise MalformedMessageError("its process id is out of range")
    return message


def decode_from_engine(payload: bytes) -> FromEngine:
    try:
        message = _decode_answer(payload)
    except Exception as error:
        raise MalformedMessageError(f"{type(error).__name__}: {error}") from None
    if isinstance(message, TokenOut):
        rows = len(message.request_ids)
        fits = len(message.token_ids) == len(message.logprobs) == rows
        fits = fits and all(0 <= t.row < rows and len(t.token_ids) == len(t.logprobs) for t in message.top_tokens)
        if not fits:
            raise MalformedMessageError("its arrays do not belong together")
    return message


def check_submitted(request: GenerationRequest, facts: ModelFacts) -> None:
    """Raise `ValidationError` for what `text/prepare.py` never makes and a device could not survive."""
    request.sampling.check(facts.vocab_size)
    for name, ids in (("inputs", request.token_ids), ("stop_token_ids", request.stop_token_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size) and not _are_pictures(request, ids, facts):
            raise ValidationError(f"`{name}` holds a token id outside the vocabulary of {facts.vocab_size}")
    if request.max_new_tokens <= 0:
        raise ValidationError("`max_new_tokens` must be strictly positive")
    if request.grammar is not None and request.grammar.kind not in GRAMMAR_KINDS:
        raise ValidationError("grammar is not valid: its kind is unknown")
    if not 0 <= request.seed <= MAX_SEED:
        raise ValidationError("`seed` must be >= 0 and < 2^64")
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        raise ValidationError(f"`cache_salt` must have at most {MAX_SALT_CHARACTERS} characters")


def _are_pictures(request: GenerationRequest, ids: list[int], facts: ModelFacts) -> bool:
    """Whether those of a prompt's ids that the vocabulary has not are such as stand for pictures, in their places."""
    if ids is not request.token_ids or facts.pictures is None:
        return False
    places = {start + n for span in request.pictures for start, count in span.runs for n in range(count)}
    end = facts.vocab_size + facts.pictures.num_more_ids
    beyond = [place for place, token in enumerate(ids) if not 0 <= token < facts.vocab_size]
    return all(place in places and 0 <= ids[place] < end for place in beyond)
