"""`[name(key=value, other="x")]`, Python's calls with its literals: Llama 4, Llama 3.2, Gemma, LFM2, Olmo 3.

Alone at the start of a line or in a code fence, where only functions that there are count, or behind a marker. In a
fence and behind a marker single calls need no list. JSON is read too, and demanded calls are written in it.
"""

import re

from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, json_cut_name
from text_generation_inference.text.tools.forms.plain_json import LAYOUT
from text_generation_inference.text.tools.python_values import take_python_value
from text_generation_inference.text.tools.reader import EndOfTextError, MalformedCallError, Steps
from text_generation_inference.text.tools.typed_values import ArgumentWriter

_ENDS = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
}
_STARTS = tuple(_ENDS)
_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"\w+")
_CUT_NAME = re.compile(r"(?:\A|[\[,;\n])\s*([\w.-]*)\Z")


def read_pythonic(calls: Calls, start: str) -> Steps[None]:
    """Calls as Python or as JSON, behind `start`: a marker, a fence or the bracket of a list."""
    reader = calls.reader
    names = None if start in _ENDS else calls.names
    yield from reader.skip_space()
    first = start if start in ("[", "{") else (yield from reader.peek())
    if first == "[":
        if first != start:
            reader.take(1)
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from calls.read_json(names, "[")
        else:
            yield from _read_calls(calls, names is None, is_list=True)
    elif first == "{":
        yield from calls.read_json(names, first if first == start else "")
    else:
        yield from _read_calls(calls, names is None, is_list=False)
    if start in _ENDS or start.startswith("```"):
        yield from reader.skip_space()
        yield from reader.try_literal(_ENDS.get(start, "```"))


def _read_calls(calls: Calls, any_name: bool, is_list: bool) -> Steps[None]:
    """One behind the other; in a list with commas between them."""
    reader = calls.reader
    while True:
        yield from _read_call(calls, any_name)
        calls.forget()
        yield from reader.skip_space()
        if is_list:
            if (yield from reader.expect(",]")) == "]":
                return
            yield from reader.skip_space()
        else:
            try:
                following = yield from reader.peek()
                if following in ",;":
                    reader.take(1)
                    yield from reader.skip_space()
                    following = yield from reader.peek()
            except EndOfTextError:
                return
            if _NAME.match(following) is None:
                return


def _read_call(calls: Calls, any_name: bool) -> Steps[None]:
    reader = calls.reader
    name = yield from reader.take_all(_NAME)
    if not name or len(name) > MAX_NAME or (not any_name and name not in calls.names):
        raise MalformedCallError
    yield from reader.skip_space()
    yield from reader.expect("(")
    calls.expect(name)
    arguments: ArgumentWriter | None = None
    try:
        while True:
            yield from reader.skip_space()
            if (yield from reader.peek()) == ")":
                break
            key = yield from reader.take_all(_KEY)
            if not key or len(key) > MAX_NAME:
                raise MalformedCallError
            yield from reader.skip_space()
            yield from reader.expect("=")
            yield from reader.skip_space()
            value = yield from take_python_value(reader)
            arguments = arguments or ArgumentWriter(calls, name)
            arguments.add_json(key, value)
            calls.forget()
            yield from reader.skip_space()
            if (yield from reader.peek()) != ")":
                yield from reader.expect(",")
    except MalformedCallError:
        if arguments is not None:  # what came before is a call, whose arguments must end
            arguments.end()
        raise
    except EndOfTextError:
        if arguments is not None:
            reader.taken = None  # what there is of the next argument is neither content nor a call
        raise
    reader.take(1)
    (arguments or ArgumentWriter(calls, name)).end()


def _cut_name(text: str) -> str:
    match = _CUT_NAME.search(text)
    return json_cut_name(text) if match is None or '"' in text else match[1]


FORM = CallForm("pythonic", (*_STARTS, *_ENDS.values()), _STARTS, read_pythonic, LAYOUT, _cut_name, bare=True)
