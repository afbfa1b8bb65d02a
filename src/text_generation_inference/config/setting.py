"""What is said of one setting beside its type and default: `Setting`, which stands on each field of `ServerConfig`.

Flag, environment variable, help, range and the reasons why something is refused or has no effect follow from it.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from text_generation_inference.errors import StartError


class Setting(msgspec.Struct, frozen=True):
    help: str = ""  # empty: not in the help
    value: str = ""  # what is shown for its value; empty: a switch
    section: str = ""  # of the help
    flag: str | None = ""  # empty: `--` and the field's name; None: there is none
    short: str = ""
    turns_off: bool = False  # the flag is a switch that makes the setting false
    variable: str | None = ""  # empty: the field's name in capitals; None: there is none
    negated: bool = False  # the variable says the opposite
    aliases: tuple[str, ...] = ()  # other names that releases gave to the variable
    listed: str = ""  # how the help names several variables at once
    told: bool = False  # a start logs the variable, though there is a flag
    default: str = ""  # in words, where it is derived
    spellings: dict[str, str] = {}  # other texts for a value
    # what makes sense
    choices: tuple[str, ...] = ()
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    check: Callable[[str, Any], None] | None = None  # raises `StartError`
    # what becomes of it
    secret: bool = False  # in no log and no error
    engine: bool = False  # read from the environment by an engine without a server too
    refused: str = ""  # why it would change answers if it were ignored
    served: tuple[str, ...] = ()  # the values that are not refused
    no_effect: str = ""  # why it changes nothing
    as_it_is: Any = msgspec.UNSET  # the value that asks for what is done anyway
    only_on: str = ""  # a device
    elsewhere: str = "it is about Gaudi, and the model runs on the {device}"  # why it changes nothing on others

    def check_value(self, name: str, value: Any) -> None:
        """Raise `StartError` if a value makes no sense."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise StartError(f"`{name}` must be one of {', '.join(self.choices)}. Given: {value}")
        if self.check is not None:
            self.check(name, value)
        if not self.holds(value):
            given = f". Given: {value}" if self.range != "> 0" else ""  # TGI's words
            raise StartError(f"`{name}` must be {self.range}{given}")

    def check_served(self, name: str, value: Any) -> None:
        """Raise `StartError` if nothing here can do what is asked for."""
        asked = value is not None and value is not False and value != 0
        if self.refused and asked and value not in self.served:
            raise StartError(f"`{name}` is set to {value!r}, which is not supported: {self.refused}")

    def holds(self, value: Any) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    @property
    def range(self) -> str:
        """In words; empty: any value."""
        bounds = ((">", self.above), (">=", self.least), ("<", self.below), ("<=", self.most))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


# -- checks of what is no range ------------------------------------------------------------------------------------

_MAX_NAME, _MAX_PART = 4096, 255  # bytes: the longest path there can be, and the longest name in it


def check_name(name: str, value: str) -> None:
    """Of names and paths, which are looked for on disk or on the hub."""
    size = len(value.encode(errors="replace"))
    if size > _MAX_NAME:
        raise StartError(f"`{name}` has {size} bytes, and no name or path has more than {_MAX_NAME}")
    longest = max(len(part.encode(errors="replace")) for part in value.split("/"))
    if longest > _MAX_PART:
        raise StartError(f"`{name}` has a name of {longest} bytes in it, and no file has one of more than {_MAX_PART}")
    if any(ord(character) < 32 or character == "\x7f" for character in value):
        raise StartError(f"`{name}` holds control characters, which no name or path has. Given: {value[:60]!r}")


def check_port(name: str, value: int) -> None:
    if not 0 <= value <= 65535:
        raise StartError(f"`{name}` must be a port, 0 to 65535. Given: {value}")


def check_key(name: str, value: str) -> None:
    if not (value.strip() and value.isascii() and value.isprintable()):
        raise StartError(f"`{name}` must be printable ASCII and not empty: no other text can be sent in a header")


def check_route(name: str, value: str) -> None:
    if not value.startswith("/"):
        raise StartError(f"`{name}` must start with '/'. Given: {value}")


def check_hosts(name: str, value: list[str]) -> None:
    """Names alone: what has a scheme, a port, a path or a star in it would never be met."""
    for host in value:
        if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9A-Fa-f:]+", host):
            raise StartError(f"`{name}` must be host names such as images.example.com. Given: {host[:60]!r}")


def check_sizes(name: str, value: list[int]) -> None:
    if any(size < 0 for size in value):
        raise StartError(f"`{name}` must be numbers of requests, 0 for none. Given: {value}")
