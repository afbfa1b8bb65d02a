"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Granite 4 and many fine-tunes."""

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps

START, END = "<tool_call>", "</tool_call>"
LAYOUT = Layout(before=(START, "\n"), behind=("\n", END), between=("\n",))


def read_tagged(calls: Calls, start: str) -> Steps[None]:
    yield from calls.read_json(None)
    yield from calls.reader.skip_space()
    yield from calls.reader.try_literal(END)


FORM = CallForm("hermes", (START, END), (START,), read_tagged, LAYOUT)
