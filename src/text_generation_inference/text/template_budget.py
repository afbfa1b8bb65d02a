"""How much a chat template may do: a budget of text and of processor time for one rendering.

Used by `template_sandbox`, which charges the budget before every operation that could be large, so that no single one
runs long and their sum ends. Text is counted in characters; a value inside a list or an object counts as a few.
"""

import re
import sys
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any, cast

from jinja2.utils import Namespace

MAX_SECONDS = 2.0  # of processor time
MAX_OUTPUT_CHARS = 4_000_000  # beyond twice what the caller sent
MAX_TEXT_CHARS = 64_000_000  # handled on the way, beyond 16 times what the caller sent
_MAX_INTEGER_BITS = 10_000
_ITEM_CHARS = 64  # what one value in a list costs
_CHARGES_PER_CLOCK_READ = 32
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0 +\-]*(\*|\d+)?(?:\.(\*|\d+))?")
_VIEWS = (dict, list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class LimitError(Exception):
    """A rendering went over its budget."""


class Budget:
    """What is left for one rendering."""

    def __init__(self, num_input_chars: int) -> None:
        self.max_output_chars = MAX_OUTPUT_CHARS + 2 * num_input_chars
        self._chars_left = MAX_TEXT_CHARS + 16 * num_input_chars
        self._max_chars = self._chars_left
        self._num_charges = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def charge(self, num_chars: int) -> None:
        """Pay for an operation on that much text; raise `LimitError` when that is more than is left."""
        self._chars_left -= num_chars + 1
        if self._chars_left < 0:
            raise LimitError(f"the template handles more than {self._max_chars} characters of text")
        self._num_charges += 1
        if self._num_charges % _CHARGES_PER_CLOCK_READ == 0 and time.thread_time() > self._deadline:
            raise LimitError(f"the template takes more than {MAX_SECONDS:g} seconds")

    def charge_value(self, value: object, indent: int = 0) -> None:
        """Pay for turning `value` into text, each level `indent` further in."""
        self.charge(len(value) if isinstance(value, str) else weigh(value, self._chars_left, indent))

    def charge_times(self, value: object, count: int) -> None:
        """Pay for the text of `value` that many times."""
        self.charge(count * (len(value) if isinstance(value, str | bytes) else weigh(value, self._chars_left)))


current: ContextVar[Budget] = ContextVar("current")


def charge(num_chars: int) -> None:
    current.get().charge(num_chars)


def charge_value(value: object) -> None:
    current.get().charge_value(value)


def weigh(value: object, limit: int = sys.maxsize, indent: int = 0) -> int:
    """About as many characters as `value` has as text; no more is looked at when that is over `limit`.

    A value that is met twice counts twice, because its text appears twice.
    """
    total = 0
    level: list[object] = [value]
    depth = 0
    while level and total <= limit:
        depth += 1
        total += len(level) * (_ITEM_CHARS + indent * depth)
        below: list[object] = []
        for item in level:
            kind = type(item)
            if kind is str:
                total += len(cast(str, item))
            elif kind is dict:
                below += cast(dict[object, object], item)
                below += cast(dict[object, object], item).values()
            elif kind is list or kind is tuple:
                below += cast(list[object], item)
            elif isinstance(item, int):
                total += item.bit_length() // 3
            elif isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, _VIEWS):
                below += cast(Iterable[object], item)
            elif isinstance(item, Namespace):
                below.append(object.__getattribute__(item, "_Namespace__attrs"))
            if len(below) * _ITEM_CHARS > limit:
                break  # the same long list many times
        level = below
    return total


def check_integers(*values: object) -> None:
    """Numbers stay so small that arithmetic with them takes no time."""
    for value in values:
        if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
            raise LimitError(f"the template computes with numbers of more than {_MAX_INTEGER_BITS} bits")


def charge_power(base: object, exponent: object) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_INTEGER_BITS:
        raise LimitError(f"the template computes with numbers of more than {_MAX_INTEGER_BITS} bits")


def charge_product(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_integers(left, right)
        return
    sequence, count = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(count, int) and count > 0 and isinstance(sequence, str | bytes | list | tuple):
        current.get().charge_times(cast(object, sequence), count)


def charge_sum(left: object, right: object) -> None:
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        charge(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        charge(_ITEM_CHARS * (len(cast(list[object], left)) + len(cast(list[object], right))))


def charge_format(text: object, arguments: object) -> None:
    """For `text % arguments`."""
    if not isinstance(text, str):
        check_integers(text, arguments)
        return
    budget = current.get()
    conversions = _CONVERSION.findall(text)
    widths = [width for conversion in conversions for width in conversion if width]
    # With a mapping, each conversion may show the same long value.
    repeats = len(conversions) if isinstance(arguments, Mapping) else 1
    budget.charge(len(text) + sum(int(width) for width in widths if width != "*"))
    budget.charge_times(cast(object, arguments), repeats)
    if "*" in widths:
        values = cast(tuple[object, ...], arguments) if isinstance(arguments, tuple) else (cast(object, arguments),)
        budget.charge(sum(abs(value) for value in values if isinstance(value, int)))


def charge_replace(text: Any, old: Any, new: Any, *_: Any) -> None:
    text, old, new = (value if isinstance(value, str | bytes) else str(value) for value in (text, old, new))
    if type(text) is type(old):
        charge(len(text) + text.count(old) * len(new))


def charge_join(separator: Any, values: list[Any]) -> None:
    budget = current.get()
    budget.charge_value(values)
    if isinstance(separator, str | bytes):
        budget.charge(len(separator) * len(values))
