"""`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and newer.

Values are plain text; the schema says what they are. Demanded calls are written in Hermes' form, which is read too.
"""

import re

from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls
from text_generation_inference.text.tools.forms.hermes import END, LAYOUT, START, read_tagged
from text_generation_inference.text.tools.reader import MalformedCallError, Steps
from text_generation_inference.text.tools.typed_values import ArgumentWriter

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.-]+")


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    yield from reader.skip_space()
    if (yield from reader.peek()) in "{[":
        yield from read_tagged(calls, start)
        return
    name = yield from reader.take_all(_NAME)
    if not name or len(name) > MAX_NAME:
        raise MalformedCallError
    calls.expect(name if reader.position < len(reader.text) else None)
    arguments: ArgumentWriter | None = None
    while True:
        yield from reader.skip_space()
        if (yield from reader.try_literal(_KEY)):
            key = yield from reader.take_until(_KEY_END, MAX_NAME)
            yield from reader.skip_space()
            if not (yield from reader.try_literal(_VALUE)):
                raise MalformedCallError
            value = yield from reader.take_text(_VALUE_END)
            arguments = arguments or ArgumentWriter(calls, name)
            arguments.add(key.strip(), value)
            continue
        if not (yield from reader.try_literal(END)) and arguments is None:
            raise MalformedCallError
        break  # whatever comes instead, the arguments are complete
    (arguments or ArgumentWriter(calls, name)).end()


def _cut_name(text: str) -> str:
    return text if _NAME.fullmatch(text) else ""


FORM = CallForm("glm", (START, END), (START,), _read, LAYOUT, _cut_name)
