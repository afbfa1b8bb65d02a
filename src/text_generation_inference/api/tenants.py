"""What keeps tenants apart in the prefix cache and among pictures: a salt, by the request or by its key.

Requests share cached prefixes and pictures only where their salts are equal; else the time to the first token would
tell whether somebody else has sent the same prompt, or the same picture.
"""

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar

from text_generation_inference.errors import ValidationError
from text_generation_inference.types import MAX_SALT_CHARACTERS

current_key: ContextVar[str] = ContextVar("current_key", default="")  # of the request that is served, hashed
_MAX_GIVEN = MAX_SALT_CHARACTERS - 65  # the rest is for the key


def key_of(headers: Mapping[str, str]) -> str:
    """The same key is the same tenant, in whichever header it comes."""
    given = headers.get("authorization", "")
    scheme, _, key = given.partition(" ")
    if key and scheme.lower() == "bearer":
        given = key
    given = given or headers.get("x-api-key", "")
    return hashlib.sha256(given.encode("latin-1", "replace")).hexdigest() if given else ""


def make_salt(given: str | None, by_key: bool) -> str:
    """The salt of a request. Nobody can name the salt that another one has by its key."""
    given = given or ""
    if len(given) > _MAX_GIVEN:
        raise ValidationError(f"`cache_salt` must have at most {_MAX_GIVEN} characters. Given: {len(given)}")
    return f"{current_key.get()}:{given}" if by_key else given
