"""`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section: Kimi K2."""

import re

from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps

_BEGIN, _ALL, _ARGUMENTS, _END, _ALL_END = MARKERS = (
    "<|tool_call_begin|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_PREFIX = "functions."
_NUMBER = re.compile(r":\d+\Z")


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    if start != _BEGIN:
        return  # around all calls
    written = yield from reader.take_until(_ARGUMENTS, MAX_NAME)
    name = _NUMBER.sub("", written.strip()).removeprefix(_PREFIX)
    calls.expect(name or None)
    yield from reader.skip_space()
    yield from calls.read_arguments(name)
    calls.forget()
    yield from reader.skip_space()
    yield from reader.try_literal(_END)


def _cut_name(text: str) -> str:
    name = text.strip()
    return "" if _PREFIX.startswith(name) else name.removeprefix(_PREFIX).partition(":")[0]


_LAYOUT = Layout(
    before=(_BEGIN,),
    behind=(_END,),
    opening=(_ALL,),
    closing=(_ALL_END,),
    head=lambda name: (f"{_PREFIX}{name}:0", _ARGUMENTS),
)
FORM = CallForm("kimi", MARKERS, (_BEGIN, _ALL, _END, _ALL_END), _read, _LAYOUT, _cut_name, named_ids=True)
