"""`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then arguments in a code fence: DeepSeek V3 and R1.

V3.1 writes the name in place of `function`, and bare arguments behind the separator. Both are read as either.
"""

from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps

_BEGIN, _ALL, _SEPARATOR, _END, _ALL_END = MARKERS = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    if start != _BEGIN:
        return  # around all calls
    name = yield from reader.take_until(_SEPARATOR, MAX_NAME)
    if name.strip() == "function":
        name = yield from reader.take_until("\n", MAX_NAME)
        calls.expect(name.strip() or None)
        yield from reader.skip_space()
        yield from reader.try_literal("```json")
        yield from reader.skip_space()
    calls.expect(name.strip() or None)
    yield from calls.read_arguments(name.strip())
    calls.forget()
    for literal in ("```", _END):
        yield from reader.skip_space()
        yield from reader.try_literal(literal)


def _cut_name(text: str) -> str:
    name = text.removeprefix("function").removeprefix(_SEPARATOR)
    return "" if "function".startswith(name) else name


_LAYOUT = Layout(
    before=(_BEGIN,),
    behind=("\n```", _END),
    between=("\n",),
    opening=(_ALL,),
    closing=(_ALL_END,),
    head=lambda name: ("function", _SEPARATOR, name + "\n```json\n"),
)
_WITH_ARGS = Layout(
    before=(_BEGIN,), behind=(_END,), opening=(_ALL,), closing=(_ALL_END,), head=lambda name: (name, _SEPARATOR)
)
_STARTS = (_BEGIN, _ALL, _END, _ALL_END)
FORM = CallForm("deepseek", MARKERS, _STARTS, _read, _LAYOUT, _cut_name)
WITH_ARGS = CallForm("deepseek_args", MARKERS, _STARTS, _read, _WITH_ARGS, _cut_name)
