"""The grammar that makes a model call a tool, in the form its family writes calls, or else answer in a format.

For `tool_choice` required and named, and for tools beside a `response_format`. What matches it is read by `parser` like
any call, so the two must agree: the tests hold them together. `text.grammar` compiles what is made here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.grammar import lark_json, lark_term
from text_generation_inference.text.json_schema import check_limits
from text_generation_inference.text.tools.form import Layout
from text_generation_inference.text.tools.formats import ToolFormat
from text_generation_inference.types import Grammar


def forced_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    name: str | None,
    parallel: bool,
    instead: Grammar | None = None,
    before_answer: Sequence[str] = (),
) -> Grammar:
    """One call of the tool `name`, or of any when that is None; with `parallel`, one or more; or else an `instead`.

    `tools` are OpenAI's: `{"type": "function", "function": {"name", "parameters"}}`. `before_answer` are terms that
    stand before an `instead`. Raises `ValidationError` for parameters that describe no object or cannot be enforced.
    """
    functions = [cast(Mapping[str, Any], tool["function"]) for tool in tools]
    functions = [function for function in functions if name is None or function["name"] == name]
    if not functions:
        raise ValidationError("`tools` holds no function to call" + (f" with the name {name!r}" if name else ""))
    if instead is None:
        return _as_lark(*_calls(tool_format, functions, parallel))
    if tool_format.form.bare:
        start, rules = _bare_calls(tool_format, functions, parallel)
    else:
        start, rules = _calls(tool_format, functions, parallel)
    return _as_lark(f"({start}) | answer", [*rules, f"answer: {' '.join((*before_answer, lark_term(instead)))}"])


def _as_lark(start: str, rules: Sequence[str]) -> Grammar:
    return Grammar("lark", "\n".join([f"start: {start}", *rules]) + "\n")


def _calls(tool_format: ToolFormat, functions: Sequence[Mapping[str, Any]], parallel: bool) -> tuple[str, list[str]]:
    """Calls as the family writes them: the start of the grammar, and its rules."""
    terms, layout = _Terms(tool_format), tool_format.form.layout
    parallel = parallel and not layout.single
    one = f"{terms.join(layout.before)} call {terms.join(layout.behind)}"
    more = f" ({terms.join(layout.between)} {one})*" if parallel else ""
    start = f"{terms.join(layout.opening)} {one}{more} {terms.join(layout.closing)}"
    if layout.lists_several and parallel:
        start = f"call | {terms.text('[')} {one}{more} {terms.text(']')}"
    calls = [_call(terms, layout, str(function["name"]), number) for number, function in enumerate(functions)]
    arguments = [f"arguments_{number}: {lark_json(_schema(function))}" for number, function in enumerate(functions)]
    return start, [*_any_of(calls), *arguments]


def _bare_calls(
    tool_format: ToolFormat, functions: Sequence[Mapping[str, Any]], parallel: bool
) -> tuple[str, list[str]]:
    """Calls that are told from an answer in JSON by what they hold.

    They must be JSON to llguidance as the answer is: it reads in units, and a text that begins like the one and goes on
    like the other has to be made of the same units.
    """
    terms, form = _Terms(tool_format), tool_format.form
    marker = f"{terms.text(form.starts[0])}? " if form.starts else ""
    start = f"{marker}call" + (f" ({terms.text(form.layout.bare_between)} call)*" if parallel else "")
    return start, _any_of([lark_json(_call_schema(function)) for function in functions])


def _any_of(calls: Sequence[str]) -> list[str]:
    alternatives = " | ".join(f"call_{number}" for number in range(len(calls)))
    return [f"call: {alternatives}", *(f"call_{number}: {call}" for number, call in enumerate(calls))]


def _call(terms: "_Terms", layout: Layout, name: str, number: int) -> str:
    arguments = f"arguments_{number}"
    if layout.head is not None:
        return f"{terms.join(layout.head(name))} {arguments}"
    head = f'{{"{layout.name_key}": {json.dumps(name, ensure_ascii=False)}, "{layout.key}": '
    return f"{terms.text(head)} {arguments} {terms.text('}')}"


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = _schema(function)
    check_limits(schema)
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "parameters": _moved(schema, "#/properties/parameters"),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: object, place: str) -> Any:
    """The schema as a part of another one, at `place` there: what it refers to in itself has moved with it."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in cast(list[object], schema)]
    if not isinstance(schema, dict):
        return schema
    members = cast(dict[str, object], schema)
    moved = {key: _moved(value, place) for key, value in members.items()}
    if isinstance((target := members.get("$ref")), str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters: object = function.get("parameters")
    schema = cast(dict[str, Any], {} if parameters is None else parameters)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValidationError(f"`parameters` of the tool {function['name']!r} must be a JSON schema of an object")
    return {**schema, "type": "object"}


class _Terms:
    """Texts as terms of the grammar; a marker that is one token as that token, which no text matches."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._ids = dict(tool_format.marker_ids)
        self._markers = tool_format.form.markers

    def text(self, text: str) -> str:
        if text in self._markers and text in self._ids:
            return f"<[{self._ids[text]}]>"
        return json.dumps(text, ensure_ascii=False)

    def join(self, texts: Sequence[str]) -> str:
        return " ".join(self.text(text) for text in texts)
