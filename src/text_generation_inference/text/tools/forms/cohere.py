"""`<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>`: Command A and R7B.

The first Command R and R+ write `Action:` and a code fence with the list.
"""

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps

_START, _END = "<|START_ACTION|>", "<|END_ACTION|>"
_WORD = "Action:"  # of the first Command R and R+


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    fenced = False
    if start == _WORD:
        yield from reader.skip_space()
        fenced = yield from reader.try_literal("```json")
    yield from calls.read_json(None if start == _START else calls.names)
    yield from reader.skip_space()
    yield from reader.try_literal("```" if fenced else _END)


_LAYOUT = Layout(between=(", ",), opening=(_START, "["), closing=("]", _END), key="parameters", name_key="tool_name")
FORM = CallForm("cohere", (_START, _END), (_START, _WORD), _read, _LAYOUT)
