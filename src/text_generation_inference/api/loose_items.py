"""Parts of a body whose form depends on their type, read one by one; what is wrong is named by its place.

For the APIs whose clients send new types every few weeks: a type nobody knows is left out and noted, not refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from text_generation_inference.errors import ValidationError

Item = TypeVar("Item")
Note = Callable[[str], None]  # told the name of what is left out


def read_item(given: object, kind: type[Item], place: str) -> Item:
    """`place` is where it stands in the body. Raises `ValidationError` that names the member that is wrong."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        detail, _, path = str(error).partition(" - at `$")
        inner = path.rstrip("`")
        if detail.startswith("Object missing required field `"):
            name = detail.removeprefix("Object missing required field `").rstrip("`")
            raise ValidationError(f"`{place}{inner}.{name}` is missing") from None
        raise ValidationError(f"`{place}{inner}`: {detail}") from None
    except RecursionError:
        raise ValidationError(f"`{place}` is nested too deeply") from None


def type_of(given: Mapping[str, Any], place: str, default: str | None = None) -> str:
    kind: object = given.get("type", default)
    if not isinstance(kind, str):
        raise ValidationError(f"`{place}.type` " + ("is missing" if kind is None else "must be a string"))
    return kind
