"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`, then `<|/tool_call|>` or not: Granite 3, Phi-4-mini."""

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps

_START, _END = "<|tool_call|>", "<|/tool_call|>"


def _read(calls: Calls, start: str) -> Steps[None]:
    yield from calls.read_json(None)
    yield from calls.reader.skip_space()
    yield from calls.reader.try_literal(_END)


FORM = CallForm(
    "tagged_list",
    (_START, _END),
    (_START,),
    _read,
    Layout(between=(", ",), opening=(_START, "["), closing=("]",)),
)
