"""Fields of request bodies that nobody reads: ignored, counted, and logged once for each name.

Clients of many servers send fields that only some of them know; an answer is worth more than a refusal. What
is looked at: the members of a body, and those of its `parameters`.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar, cast

import msgspec

log = logging.getLogger("text_generation_inference.api")

_MAX_NAMES = 256  # that are logged; names come from callers
_MAX_LENGTH = 64  # characters of a name in the log
_MAX_COLONS = 20_000  # in a body that is looked at: no member without one, and 100,000 members would take 60 ms
_INNER = "parameters"

Body = TypeVar("Body")
_members_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BodyForm(Generic[Body]):
    """How the body of a route is read."""

    def __init__(self, kind: type[Body]) -> None:
        self._kind = kind
        self.decode = msgspec.json.Decoder(kind).decode

    def unknown_names(self, data: bytes) -> list[str]:
        """Of a body that could be decoded. Values are skipped, not read."""
        if data.count(b":") > _MAX_COLONS:
            return []
        try:
            members: dict[str, Any] = {**_members_of(data)}
            if _INNER in members and bytes(memoryview(members[_INNER])[:1]) == b"{":
                members[_INNER] = _members_of(members[_INNER])
        except (msgspec.DecodeError, UnicodeDecodeError):  # a name that is no text
            return ["?"]
        return unknown_names(members, self._kind)


def unknown_names(members: object, kind: Any) -> list[str]:
    """The members of a decoded object, and of its `parameters`, that `kind` has no field for."""
    if not isinstance(members, dict):
        return []
    given = cast(dict[str, Any], members)
    names, inner = _names_of(kind)
    found = [name for name in given if name not in names]
    parameters: object = given.get(_INNER)
    if inner is not None and isinstance(parameters, dict):
        found += [f"{_INNER}.{name}" for name in cast(dict[str, Any], parameters) if name not in inner]
    return found


_known: dict[Any, tuple[frozenset[str], frozenset[str] | None]] = {}


def _names_of(kind: Any) -> tuple[frozenset[str], frozenset[str] | None]:
    """The fields of a struct, and those of its `parameters` if it has such a field."""
    if kind not in _known:
        info = msgspec.inspect.type_info(kind)
        assert isinstance(info, msgspec.inspect.StructType)
        inner = [_struct_of(field.type) for field in info.fields if field.encode_name == _INNER]
        _known[kind] = _encoded(info.fields), _encoded(inner[0].fields) if inner else None
    return _known[kind]


def _struct_of(kind: msgspec.inspect.Type) -> msgspec.inspect.StructType:
    if isinstance(kind, msgspec.inspect.Metadata):  # words for the API document
        kind = kind.type
    variants = kind.types if isinstance(kind, msgspec.inspect.UnionType) else [kind]
    return next(variant for variant in variants if isinstance(variant, msgspec.inspect.StructType))


def _encoded(fields: Iterable[msgspec.inspect.Field]) -> frozenset[str]:
    return frozenset(field.encode_name for field in fields)


class UnknownFields:
    """The names met since the start."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._names: set[str] = set()

    def note(self, names: Collection[str]) -> None:
        if not names:
            return
        self._count(len(names))
        for name in names:
            if len(self._names) == _MAX_NAMES:
                return
            shown = name[:_MAX_LENGTH]
            if shown not in self._names:
                self._names.add(shown)
                log.info("The field %r of a request is not known and has no effect", shown)
                if len(self._names) == _MAX_NAMES:
                    log.info("Further names of unknown fields are not logged")
