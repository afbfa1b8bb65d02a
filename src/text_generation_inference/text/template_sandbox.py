"""The Jinja environment in which chat templates run: what they are given and what they can reach.

Used by `template_rendering`. Names and filters are those of transformers. A template can change nothing and reaches no
Python internals; the process it runs in bounds its time and memory (`template_process`).
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        filters = cast(dict[str, Callable[..., Any]], self.filters)  # pyright: ignore[reportUnknownMemberType]
        filters["tojson"] = _to_json
        names = cast(dict[str, Any], self.globals)  # pyright: ignore[reportUnknownMemberType]
        names["raise_exception"] = _raise_exception
        names["strftime_now"] = _strftime_now
        names["namespace"] = _Namespace


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's words for training: only its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own: what is set inside is not seen behind the block.
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, through which templates could reach Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        self, *pairs = args
        values: dict[str, Any] = dict(*pairs, **attributes)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML and sorts; models saw neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)
