"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Granite 4 and many fine-tunes."""

import re

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import MalformedCallError, Steps

START, END = "<tool_call>", "</tool_call>"
LAYOUT = Layout(before=(START, "\n"), behind=("\n", END), between=("\n",))
_STRAY = re.compile(r"[\s}\]]+")


def read_tagged(calls: Calls, start: str, end: str = END) -> Steps[None]:
    """A bracket too few or too many behind the arguments of a call is no content, nor is the end marker behind it."""
    try:
        yield from calls.read_json(None)
    except MalformedCallError:
        if calls.reader.taken is not None:  # no call has begun
            raise
    yield from calls.reader.take_all(_STRAY)
    yield from calls.reader.try_literal(end)


FORM = CallForm("hermes", (START, END), (START,), read_tagged, LAYOUT)
