"""`Fields`: an object of config.json whose wrong members are named in the error, and the names it lists of matrices."""

import re
from collections.abc import Mapping
from typing import Any

from text_generation_inference.errors import ModelFormatError


class Fields:
    def __init__(self, value: Any, place: str, way_out: str = "") -> None:
        if not isinstance(value, Mapping):
            raise ModelFormatError(f"{place} must be an object, it is {value!r}")
        self.value: Mapping[str, Any] = value
        self.place = place
        self.way_out = way_out  # what to do instead, said wherever something is refused

    def refuse(self, name: str, supported: str) -> ModelFormatError:
        given = self.value.get(name)
        return ModelFormatError(
            f"{self.place}: `{name}` {given!r} is not supported, {supported} is. {self.way_out}".rstrip()
        )

    def get(self, name: str) -> Any:
        return self.value.get(name)

    def text(self, name: str, default: str) -> str:
        value = self.value.get(name)
        if value is not None and not isinstance(value, str):
            raise ModelFormatError(f"{self.place}: `{name}` must be text, it is {value!r}")
        return default if value is None else value

    def truth(self, name: str, default: bool) -> bool:
        value = self.value.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelFormatError(f"{self.place}: `{name}` must be true or false, it is {value!r}")
        return default if value is None else value

    def integer(self, name: str, default: int) -> int:
        value = self.value.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelFormatError(f"{self.place}: `{name}` must be an integer, it is {value!r}")
        return default if value is None else value

    def below(self, name: str) -> "Fields":
        return Fields(self.value.get(name), f"{self.place}.{name}", self.way_out)

    def patterns(self, name: str) -> tuple[str, ...]:
        value = self.value.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise ModelFormatError(f"{self.place}: `{name}` must be a list of names, it is {value!r}")
        for item in value:
            try:
                re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
            except (re.error, RecursionError, OverflowError) as error:
                raise ModelFormatError(f"{self.place}: `{name}` has {item!r}, which is no pattern: {error}") from None
        return tuple(value)
