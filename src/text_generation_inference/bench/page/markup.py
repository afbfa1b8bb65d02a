"""HTML and SVG that cannot be broken by what is put into them.

Standard library only. A plain string is text and gets escaped; only what came from here is markup.
"""

import html
import re
from collections.abc import Iterable

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_EMPTY_TAGS = ("meta", "link", "br")


class Markup(str):
    """Goes into a page as it is."""

    __slots__ = ()


def escape(text: str) -> str:
    """Characters that no page may contain become the mark for unknown ones."""
    return html.escape(_CONTROL.sub("\ufffd", text))


def join(children: Iterable[str]) -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def tag(name: str, /, *children: "str | Iterable[str] | None", **attributes: "str | float | bool | None") -> Markup:
    """An element. `class_` is class, `data_tip` is data-tip; None and False leave an attribute or a child out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(_attribute(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inside = join(
        piece for child in children if child is not None for piece in ([child] if isinstance(child, str) else child)
    )
    return Markup(f"<{name}{written}>" if name in _EMPTY_TAGS else f"<{name}{written}>{inside}</{name}>")


def _attribute(value: "str | float | bool") -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
