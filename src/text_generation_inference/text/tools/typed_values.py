"""Arguments that a model writes as plain text, one by one: their values as the function's schema has them."""

import json
from collections.abc import Mapping
from typing import Any, cast

from text_generation_inference.text.tools.form import Calls


class ArgumentWriter:
    """Tells the arguments of one call as the text of a JSON object, each as soon as it is known."""

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self._schema = calls, calls.schema(name)
        self._count = 0
        calls.start(name)
        calls.arguments("{")

    def add(self, key: str, text: str, is_text: bool = False) -> None:
        """A value that is plain text; with `is_text` it is known to be one, else the schema says what it is."""
        self.add_json(key, json.dumps(text, ensure_ascii=False) if is_text else typed_value(text, self._schema, key))

    def add_json(self, key: str, value: str) -> None:
        separator = ", " if self._count else ""
        self._calls.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        self._count += 1

    def end(self) -> None:
        self._calls.arguments("}")


def typed_value(text: str, schema: Mapping[str, Any], key: str) -> str:
    """The JSON of a value: text where the schema allows text, else what the text says if that is JSON."""
    kinds = _kinds(_member(_member(schema, "properties"), key))
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return json.dumps(text, ensure_ascii=False)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        word = {"true": "true", "false": "false", "none": "null"}.get(text.strip().lower())  # Python's words
        return word if word is not None else json.dumps(text, ensure_ascii=False)
    return text.strip()


def _member(value: object, key: str) -> Mapping[str, Any]:
    inner = cast(Mapping[str, Any], value).get(key) if isinstance(value, Mapping) else None
    return cast(Mapping[str, Any], inner) if isinstance(inner, Mapping) else {}


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, as far as it says so at the top."""
    kind: object = schema.get("type")
    named = cast(list[object], kind) if isinstance(kind, list) else [kind]
    kinds = {name for name in named if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        branches: object = schema.get(key)
        for branch in cast(list[object], branches) if isinstance(branches, list) else []:
            if isinstance(branch, Mapping):
                kinds |= _kinds(cast(Mapping[str, Any], branch))
    values: object = schema.get("enum")
    if not kinds and isinstance(values, list):
        kinds = {"string" for value in cast(list[object], values) if isinstance(value, str)}
    return kinds


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
