"""What is said of one form of tool call: how it is known, read and forced. One file of `forms` for each.

A form reads through `Calls`, which the parser is: it takes text from the reader and tells what calls it found.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from text_generation_inference.text.tools.reader import Reader, Steps

MAX_NAME = 256
_CUT_NAME = re.compile(r'"(?:name|function|tool_name)"\s*:\s*"([^"\\]*)\Z')


class Calls(Protocol):
    """What the reader of a form works with."""

    @property
    def reader(self) -> Reader: ...

    @property
    def names(self) -> Collection[str]:
        """Of the functions that may be called."""
        ...

    def schema(self, name: str) -> Mapping[str, Any]:
        """The parameters of a function, as a JSON schema; empty when nothing is known of them."""
        ...

    def expect(self, name: str | None) -> None:
        """The call that is being read is one of this function, and has not begun."""
        ...

    def start(self, name: str) -> None:
        """A call begins: what was taken so far is no content."""
        ...

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        ...

    def forget(self) -> None:
        """What was taken since the last call is no content."""
        ...

    def read_json(self, names: Collection[str] | None, bracket: str = "") -> Steps[None]:
        """Calls as objects, alone or in a list, whose first `bracket` may have been taken already.

        With `names`, only calls of these are calls.
        """
        ...

    def read_arguments(self, name: str) -> Steps[None]:
        """A call of `name` whose arguments come next, as an object."""
        ...


@dataclass(frozen=True)
class Layout:
    """How calls are written where a grammar demands them; texts that are markers stand for their tokens."""

    before: tuple[str, ...] = ()  # each call
    behind: tuple[str, ...] = ()
    between: tuple[str, ...] = ()  # two calls
    opening: tuple[str, ...] = ()  # of all calls together
    closing: tuple[str, ...] = ()
    head: Callable[[str], tuple[str, ...]] | None = None  # from a name to what stands before its arguments, if not JSON
    key: str = "arguments"  # of the arguments, if the call is JSON
    name_key: str = "name"
    lists_several: bool = False  # several calls stand in a list, one call alone
    single: bool = False  # there is room for one call
    bare_between: str = ""  # where an answer in JSON may stand in their place


def json_cut_name(text: str) -> str:
    """What a call in JSON that was cut off says of its function's name: the beginning of it, or nothing."""
    match = _CUT_NAME.search(text)
    return "" if match is None else match[1]


@dataclass(frozen=True)
class CallForm:
    name: str
    markers: tuple[str, ...]  # texts that mean something, whose tokens must not be hidden
    starts: tuple[str, ...]  # those that begin a call
    read: Callable[[Calls, str], Steps[None]]  # behind one of `starts`, or where a call without a marker begins
    layout: Layout
    cut_name: Callable[[str], str] = json_cut_name
    bare: bool = False  # calls may come without a marker, and are told from content by what they hold
    short_ids: bool = False  # templates want ids of nine letters and digits
    named_ids: bool = False  # templates want ids with the name and the number of the call
