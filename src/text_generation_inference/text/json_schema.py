"""A caller's JSON schema, checked and put into the form that `grammar` compiles.

`check_limits` bounds what a schema may cost before anything is compiled. `prepare_schema` checks it as the
draft 2020-12 meta-schema would and returns a narrowed copy: everything that matches the copy also matches the
original, as far as it can be enforced token by token. Knows nothing of tokens or of llguidance.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeGuard, cast

from text_generation_inference.errors import ValidationError

MAX_DEPTH = 100  # llguidance reads at most 128 levels, some of which it adds itself
MAX_VALUES = 20_000  # objects, lists and scalars together
MAX_MEMBERS = 1000  # of one object: the cost of optional properties is quadratic
MAX_PATTERNS = 50  # of one `patternProperties`: each is compared with each
MAX_STRING = 10_000  # characters; a long constant is forced byte by byte in every step
# A number is recognised as a multiple by its remainder, which makes as many states as the least common multiple of all.
MAX_MULTIPLE = 20_000
_LARGEST_MULTIPLE = 10**18

_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_SCHEMA = ("items", "additionalProperties")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TEXTS = ("$ref", "pattern", "format", "$schema", "$id", "$anchor", "title", "description")
_ANNOTATIONS = ("title", "description", "default", "examples")  # no part of the meaning
# TGI ignored these, and they cannot be enforced while a value is being written.
IGNORED = (
    "uniqueItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$schema",
    "$comment",
)


def check_limits(document: object) -> None:
    """Raise `ValidationError` for a schema that would cost too much, wherever in it the trouble lies."""
    multiple = 1
    num_values = 0
    level: list[object] = [document]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        num_values += len(level)
        _require(num_values <= MAX_VALUES, f"it holds more than {MAX_VALUES} values")
        for value in level:
            if isinstance(value, str):
                _require(len(value) <= MAX_STRING, f"it holds a text of more than {MAX_STRING} characters")
            elif isinstance(value, dict):
                members = cast(dict[str, object], value)
                _require(len(members) <= MAX_MEMBERS, f"it holds an object of more than {MAX_MEMBERS} members")
                patterns = members.get("patternProperties")
                few = not isinstance(patterns, dict) or len(cast(dict[str, object], patterns)) <= MAX_PATTERNS
                _require(few, f"it holds `patternProperties` of more than {MAX_PATTERNS} members")
                multiple = math.lcm(multiple, _coefficient(members.get("multipleOf")))
                _require(
                    multiple <= MAX_MULTIPLE, f"the least common multiple of all `multipleOf` exceeds {MAX_MULTIPLE}"
                )
                deeper += members.keys()
                deeper += members.values()
            elif isinstance(value, list):
                deeper += cast(list[object], value)
        level = deeper
        if not level:
            return
    _require(False, f"it nests deeper than {MAX_DEPTH} levels")


def prepare_schema(schema: object) -> dict[str, Any]:
    """The schema to compile. Raises `ValidationError` unless it is a valid one."""
    checked = _check(schema, "")
    if isinstance(checked, bool):
        _require(checked, "`false` matches nothing")
        return {}
    if not _composes(checked):
        _narrow(checked)
    return checked


def _check(schema: object, where: str) -> dict[str, Any] | bool:
    """A deep enough copy of a valid schema, without what is ignored or says nothing."""
    if isinstance(schema, bool):
        return schema
    _require(isinstance(schema, dict), f"{where or 'the schema'} must be an object or a boolean")
    result: dict[str, Any] = {}
    for name, value in cast(dict[str, Any], schema).items():
        if name in IGNORED:
            continue
        path = f"{where}/{name}"
        if name in _SCHEMA:
            value = _check(value, path)
        elif name in _SCHEMA_LISTS:
            items = cast(list[object], value) if isinstance(value, list) else []
            _require(items, f"{path} must be a list that is not empty")
            value = [_check(item, f"{path}/{number}") for number, item in enumerate(items)]
        elif name in _SCHEMA_MAPS:
            _require(isinstance(value, dict), f"{path} must be an object")
            value = {key: _check(item, f"{path}/{key}") for key, item in value.items()}
        else:
            _check_value(name, value, path)
        if name not in _ANNOTATIONS:
            result[name] = value
    if "properties" in result:
        result.setdefault("type", "object")  # as TGI reads it
    return result


def _check_value(name: str, value: Any, path: str) -> None:
    if name == "type":
        types = cast(list[object], value) if isinstance(value, list) else [value]
        known = bool(types) and all(item in _TYPES for item in types)
        _require(known and len(set(map(str, types))) == len(types), f"{path} must be among {', '.join(_TYPES)}")
    elif name == "required":
        texts = isinstance(value, list) and all(isinstance(item, str) for item in cast(list[object], value))
        _require(texts, f"{path} must be a list of names")
    elif name == "enum":
        _require(isinstance(value, list), f"{path} must be a list")
    elif name == "multipleOf":
        _require(_is_number(value) and value > 0, f"{path} must be a number > 0")
    elif name in _COUNTS:
        whole = _is_number(value) and value >= 0 and float(value).is_integer()
        _require(whole, f"{path} must be a whole number >= 0")
    elif name in _NUMBERS:
        _require(_is_number(value), f"{path} must be a number")
    elif name in _TEXTS:
        _require(isinstance(value, str), f"{path} must be a string")


def _composes(schema: dict[str, Any]) -> bool:
    """Whether objects are put together from several schemas: then none of the parts may be narrowed alone."""
    parts = [name for name in ("allOf", "anyOf", "oneOf", "$ref") if name in schema]
    if len(schema.get("allOf", ())) > 1 or len(parts) > 1 or (parts and "properties" in schema):
        return True
    return _any_below(schema, _composes)


def _narrow(schema: dict[str, Any]) -> bool:
    """As TGI did: only the listed properties; a pattern without anchors is the whole string."""
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    pattern: str = schema.get("pattern", "^")
    alone = not any(name in schema for name in ("minLength", "maxLength", "format"))
    if alone and not (pattern.startswith("^") or pattern.endswith("$")):
        schema["pattern"] = f"^(?:{pattern})$"
    _any_below(schema, _narrow)
    return False


def _any_below(schema: dict[str, Any], holds: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether it holds for one of the schemas directly inside; asks until it does."""
    below = [schema[name] for name in _SCHEMA if name in schema]
    below += [item for name in _SCHEMA_LISTS for item in schema.get(name, ())]
    below += [item for name in _SCHEMA_MAPS for item in schema.get(name, {}).values()]
    return any(holds(cast(dict[str, Any], item)) for item in below if isinstance(item, dict))


def _coefficient(multiple: object) -> int:
    """The digits of a `multipleOf`; powers of ten make no states."""
    if not _is_number(multiple) or not multiple:
        return 1
    if abs(multiple) > _LARGEST_MULTIPLE:
        return MAX_MULTIPLE + 1
    digits = Decimal(repr(multiple)).normalize().as_tuple().digits
    return int("".join(map(str, digits)))


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: object, detail: str) -> None:
    if not condition:
        raise ValidationError(f"grammar is not valid: {detail}")
