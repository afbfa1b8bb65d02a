"""`{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or not: Llama 3.1 and newer; Llama 4's tags differ.

Small ones of Llama 3.2, and Llama 4, write lists of Python's calls as well, as they were asked.
"""

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.forms.pythonic import read_pythonic
from text_generation_inference.text.tools.reader import Steps

_STARTS = ("<|python_tag|>", "<|python_start|>")
_END = "<|python_end|>"


def _read(calls: Calls, start: str) -> Steps[None]:
    if start != _STARTS[0]:
        yield from read_pythonic(calls, start)
        return
    yield from calls.read_json(None)
    yield from calls.reader.try_literal(_END)


_LAYOUT = Layout(between=("; ",), key="parameters", bare_between="; ")
FORM = CallForm("llama3", (*_STARTS, _END), _STARTS, _read, _LAYOUT, bare=True)
