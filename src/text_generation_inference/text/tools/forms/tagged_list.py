"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`, then `<|/tool_call|>` or not: Granite 3, Phi-4-mini.

Granite 3.1 and newer are asked for that token and write `<tool_call>` too, in plain text.
"""

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps

_START, _END = "<|tool_call|>", "<|/tool_call|>"
_PLAIN_START, _PLAIN_END = "<tool_call>", "</tool_call>"


def _read(calls: Calls, start: str) -> Steps[None]:
    yield from calls.read_json(None)
    yield from calls.reader.skip_space()
    yield from calls.reader.try_literal(_PLAIN_END if start == _PLAIN_START else _END)


FORM = CallForm(
    "tagged_list",
    (_START, _END),
    (_START, _PLAIN_START),
    _read,
    Layout(between=(", ",), opening=(_START, "["), closing=("]",)),
)
