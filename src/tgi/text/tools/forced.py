"""The grammar that makes a model call a tool, in the form its family writes calls.

For `tool_choice` required and named. What matches it is read by `parser` like any call, so the two must agree: the
tests hold them together. `tgi.text.grammar` compiles what is made here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tgi.errors import ValidationError
from tgi.text.grammar import lark_json
from tgi.text.tools.formats import MARKERS, Family, ToolFormat
from tgi.types import Grammar

# Around the text of one call, and between two, as terms of the grammar; a marker stands for itself.
_LAYOUTS: dict[Family, tuple[list[str], list[str], list[str]]] = {
    "hermes": (["<tool_call>", "\n"], ["\n", "</tool_call>"], ["\n"]),
    "llama3": ([], [], ["; "]),
    "mistral": ([], [], [", "]),
    "mistral_args": (["[TOOL_CALLS]"], [], []),
    "deepseek": (["<｜tool▁call▁begin｜>"], ["\n```", "<｜tool▁call▁end｜>"], ["\n"]),
    "json": ([], [], [", "]),
}


def forced_grammar(
    tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], name: str | None, parallel: bool
) -> Grammar:
    """One call of the tool `name`, or of any when that is None; with `parallel`, one or more.

    `tools` are OpenAI's: `{"type": "function", "function": {"name", "parameters"}}`. Raises `ValidationError` for
    parameters that describe no object or cannot be enforced.
    """
    functions = [cast(Mapping[str, Any], tool["function"]) for tool in tools]
    functions = [function for function in functions if name is None or function["name"] == name]
    if not functions:
        raise ValidationError("`tools` holds no function to call" + (f" with the name {name!r}" if name else ""))
    terms = _Terms(tool_format)
    before, behind, between = (terms.join(part) for part in _LAYOUTS[tool_format.family])
    one = f"{before} call {behind}"
    more = f" ({between} {one})*" if parallel else ""
    match tool_format.family:
        case "mistral":
            start = f"{terms.join(['[TOOL_CALLS]', '['])} {one}{more} {terms.text(']')}"
        case "json" if parallel:
            start = f"call | {terms.text('[')} {one}{more} {terms.text(']')}"
        case "deepseek":
            start = f"{terms.text('<｜tool▁calls▁begin｜>')} {one}{more} {terms.text('<｜tool▁calls▁end｜>')}"
        case _:
            start = f"{one}{more}"
    calls = [_call(terms, tool_format.family, function, number) for number, function in enumerate(functions)]
    rules = [f"call_{number}: {call}" for number, call in enumerate(calls)]
    alternatives = " | ".join(f"call_{number}" for number in range(len(calls)))
    arguments = [f"arguments_{number}: {_arguments(function)}" for number, function in enumerate(functions)]
    return Grammar("lark", "\n".join([f"start: {start}", f"call: {alternatives}", *rules, *arguments]) + "\n")


def _call(terms: "_Terms", family: Family, function: Mapping[str, Any], number: int) -> str:
    name, arguments = str(function["name"]), f"arguments_{number}"
    match family:
        case "mistral_args":
            return f"{terms.join([name, '[ARGS]'])} {arguments}"
        case "deepseek":
            head = ["function", "<｜tool▁sep｜>", name + "\n```json\n"]
            return f"{terms.join(head)} {arguments}"
        case _:
            key = "parameters" if family in ("llama3", "json") else "arguments"
            head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
            return f"{terms.text(head)} {arguments} {terms.text('}')}"


def _arguments(function: Mapping[str, Any]) -> str:
    parameters: object = function.get("parameters")
    schema = cast(dict[str, Any], {} if parameters is None else parameters)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValidationError(f"`parameters` of the tool {function['name']!r} must be a JSON schema of an object")
    return lark_json({**schema, "type": "object"})


class _Terms:
    """Texts as terms of the grammar; a marker that is one token as that token, which no text matches."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._ids = dict(tool_format.marker_ids)
        self._markers = MARKERS[tool_format.family]

    def text(self, text: str) -> str:
        if text in self._markers and text in self._ids:
            return f"<[{self._ids[text]}]>"
        return json.dumps(text, ensure_ascii=False)

    def join(self, texts: Sequence[str]) -> str:
        return " ".join(self.text(text) for text in texts)
