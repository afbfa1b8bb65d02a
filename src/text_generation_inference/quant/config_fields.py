"""`Fields`: an object of config.json whose wrong members are named in the error, and the names it lists of matrices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import shorten
from text_generation_inference.quant.expressions import Expression, PatternError, Work


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Matrices: by a name, or by an expression (`re:`) that matches from the start of a name."""

    text: str
    place: str = field(default="", compare=False)  # where it stands
    work: Work = field(default_factory=Work, compare=False, repr=False)
    source: str | None = None  # of the expression, where it has no `re:` before it
    expression: Expression | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        source = self.text.removeprefix("re:") if self.text.startswith("re:") else self.source
        try:
            made = None if source is None else Expression(source, self.work)
        except PatternError as error:
            raise self._refuse(error) from None
        object.__setattr__(self, "expression", made)

    def matches(self, name: str) -> bool:
        """Whether the expression does. A plain name says nothing here: formats differ in what it stands for."""
        try:
            return self.expression is not None and self.expression.matches(name)
        except PatternError as error:
            raise self._refuse(error) from None

    def _refuse(self, error: PatternError) -> ModelFormatError:
        return ModelFormatError(f"{self.place} has {shorten(self.text)}: {error}")


class Fields:
    def __init__(self, value: Any, place: str, way_out: str = "", work: Work | None = None) -> None:
        if not isinstance(value, Mapping):
            raise ModelFormatError(f"{place} must be an object, it is {shorten(value)}")
        self.value: Mapping[str, Any] = value
        self.place = place
        self.way_out = way_out  # what to do instead, said wherever something is refused
        self.work = work or Work()

    def refuse(self, name: str, supported: str) -> ModelFormatError:
        given = self.value.get(name)
        return ModelFormatError(
            f"{self.place}: `{name}` {shorten(given)} is not supported, {supported} is. {self.way_out}".rstrip()
        )

    def get(self, name: str) -> Any:
        return self.value.get(name)

    def text(self, name: str, default: str) -> str:
        value = self.value.get(name)
        if value is not None and not isinstance(value, str):
            raise ModelFormatError(f"{self.place}: `{name}` must be text, it is {shorten(value)}")
        return default if value is None else value

    def truth(self, name: str, default: bool) -> bool:
        value = self.value.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelFormatError(f"{self.place}: `{name}` must be true or false, it is {shorten(value)}")
        return default if value is None else value

    def integer(self, name: str, default: int) -> int:
        value = self.value.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelFormatError(f"{self.place}: `{name}` must be an integer, it is {shorten(value)}")
        return default if value is None else value

    def below(self, name: str) -> "Fields":
        return Fields(self.value.get(name), f"{self.place}.{name}", self.way_out, self.work)

    def names(self, name: str) -> tuple[str, ...]:
        value = self.value.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise ModelFormatError(f"{self.place}: `{name}` must be a list of names, it is {shorten(value)}")
        return tuple(value)

    def patterns(self, name: str) -> tuple[NamePattern, ...]:
        return tuple(NamePattern(item, f"{self.place}: `{name}`", self.work) for item in self.names(name))
