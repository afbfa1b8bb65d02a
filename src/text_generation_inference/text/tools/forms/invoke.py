"""`<invoke name="..."><parameter name="key">value</parameter></invoke>` in a section: MiniMax M2, DeepSeek V3.2.

DeepSeek puts `｜DSML｜` into every tag and says of each value whether it is text. Demanded calls are JSON in the
section, which is read too.
"""

import re

from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, Layout, json_cut_name
from text_generation_inference.text.tools.forms.hermes import read_tagged
from text_generation_inference.text.tools.reader import MalformedCallError, Steps
from text_generation_inference.text.tools.typed_values import ArgumentWriter

_QUOTED = re.compile(r"name=[\"']?([^\"'>]*)")
_CUT_NAME = re.compile(r"invoke name=[\"']?([^\"'>]*)\Z")


def _make(name: str, prefix: str, section: str) -> CallForm:
    """`prefix` is what each tag begins with; `section` the name of the one around all calls, with its own prefix."""
    start, end = f"<{section}>", f"</{section}>"
    invoke, invoke_end = f"<{prefix}invoke ", f"</{prefix}invoke>"
    parameter, parameter_end = f"<{prefix}parameter ", f"</{prefix}parameter>"

    def read(calls: Calls, found: str) -> Steps[None]:
        reader = calls.reader
        if found == start:
            yield from reader.skip_space()
            if (yield from reader.peek()) in "{[":
                yield from read_tagged(calls, start, end)
                return
            if not (yield from reader.try_literal(invoke)):
                raise MalformedCallError
        while True:
            yield from read_call(calls)
            calls.forget()
            yield from reader.skip_space()
            if not (yield from reader.try_literal(invoke)):
                break
        yield from reader.try_literal(end)

    def read_call(calls: Calls) -> Steps[None]:
        reader = calls.reader
        called, _ = yield from _attributes(calls)
        calls.expect(called)
        arguments: ArgumentWriter | None = None
        while True:
            yield from reader.skip_space()
            if (yield from reader.try_literal(parameter)):
                key, others = yield from _attributes(calls)
                value = yield from reader.take_text(parameter_end)
                arguments = arguments or ArgumentWriter(calls, called)
                arguments.add(key, value, is_text='string="true"' in others)
                continue
            if not (yield from reader.try_literal(invoke_end)) and arguments is None:
                raise MalformedCallError
            break  # whatever comes instead, the arguments are complete
        (arguments or ArgumentWriter(calls, called)).end()

    layout = Layout(before=(start, "\n"), behind=("\n", end), between=("\n",))
    return CallForm(name, (start, end), (start, invoke), read, layout, _cut_name)


def _attributes(calls: Calls) -> Steps[tuple[str, str]]:
    """The name in a tag that has begun, and all of its attributes."""
    attributes = yield from calls.reader.take_until(">", MAX_NAME)
    match = _QUOTED.search(attributes)
    if match is None or not match[1] or "<" in attributes:
        raise MalformedCallError
    return match[1], attributes


def _cut_name(text: str) -> str:
    match = _CUT_NAME.search(text)
    return json_cut_name(text) if match is None else match[1]


MINIMAX = _make("minimax", "", "minimax:tool_call")
DSML = _make("dsml", "｜DSML｜", "｜DSML｜function_calls")
