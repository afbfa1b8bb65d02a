"""`{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or not: Llama 3.1 and newer; Llama 4's tags differ."""

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.forms.plain_json import read_bare
from text_generation_inference.text.tools.reader import Steps

_STARTS = ("<|python_tag|>", "<|python_start|>")
_END = "<|python_end|>"


def _read(calls: Calls, start: str) -> Steps[None]:
    if start not in _STARTS:
        yield from read_bare(calls, start)
        return
    yield from calls.read_json(None)
    yield from calls.reader.try_literal(_END)


_LAYOUT = Layout(between=("; ",), key="parameters", bare_between="; ")
FORM = CallForm("llama3", (*_STARTS, _END), _STARTS, _read, _LAYOUT, bare=True)
