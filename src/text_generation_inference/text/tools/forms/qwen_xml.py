"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Nemotron 3.

Seed-OSS has tags of its own around the function. Values are plain text; the schema says what they are. Demanded
calls are written in Hermes' form, which is read too.
"""

import re

from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, Layout
from text_generation_inference.text.tools.forms.hermes import END, LAYOUT, START, read_tagged
from text_generation_inference.text.tools.reader import MalformedCallError, Steps
from text_generation_inference.text.tools.typed_values import ArgumentWriter

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SEED = ("<seed:tool_call>", "</seed:tool_call>")  # in place of Qwen's
_CUT_NAME = re.compile(r"<function=([^>]*)\Z")


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    end = _SEED[1] if start == _SEED[0] else END
    if start in (START, _SEED[0]):
        yield from reader.skip_space()
        if (yield from reader.peek()) in "{[":
            yield from read_tagged(calls, start, end)
            return
        if not (yield from reader.try_literal(_FUNCTION)):
            raise MalformedCallError
    name = (yield from reader.take_until(">", MAX_NAME)).strip().strip("\"'")
    if not name or "<" in name:
        raise MalformedCallError
    calls.expect(name)
    arguments: ArgumentWriter | None = None
    while True:
        yield from reader.skip_space()
        if (yield from reader.try_literal(_PARAMETER)):
            key = (yield from reader.take_until(">", MAX_NAME)).strip().strip("\"'")
            value = yield from reader.take_text(_PARAMETER_END)
            arguments = arguments or ArgumentWriter(calls, name)
            arguments.add(key, value.removeprefix("\n").removesuffix("\n"))
            continue
        if (yield from reader.try_literal(_FUNCTION_END)):
            break
        if arguments is None:
            raise MalformedCallError
        break  # whatever comes instead, the arguments are complete
    (arguments or ArgumentWriter(calls, name)).end()
    calls.forget()
    yield from reader.skip_space()
    yield from reader.try_literal(end)


def _cut_name(text: str) -> str:
    match = _CUT_NAME.search(text)
    return "" if match is None else match[1]


FORM = CallForm("qwen_xml", (START, END), (START, _FUNCTION), _read, LAYOUT, _cut_name)
SEED = CallForm(
    "seed",
    _SEED,
    (_SEED[0], _FUNCTION),
    _read,
    Layout(before=(_SEED[0], "\n"), behind=("\n", _SEED[1]), between=("\n",)),
    _cut_name,
)
