"""What the API document says of a field beyond its type and default: words, an example, a range.

Stands on the fields of `bodies` and `openai_bodies`; `openapi` reads it. A range here is not checked by decoding: that
is done in `validate` and `openai_sampling`, whose texts clients know.
"""

from typing import Any

from msgspec import Meta

from text_generation_inference.types import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY

ABOVE_0 = {"minimum": 0, "exclusiveMinimum": True}
BETWEEN_0_AND_1 = {**ABOVE_0, "maximum": 1, "exclusiveMaximum": True}
WITHIN_2 = {"minimum": -2, "maximum": 2}
REPETITION = {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY}

NOT_SERVED = "x-not-served"  # a field that is known only to be refused with a clear text


def doc(text: str = "", *, example: Any = None, **schema: Any) -> Meta:
    """Annotates a field. `schema` is what OpenAPI 3.0 has for ranges."""
    if example is not None:
        schema["example"] = example
    return Meta(description=text or None, extra_json_schema=schema or None)


refused = Meta(extra_json_schema={NOT_SERVED: True})
