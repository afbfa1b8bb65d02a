"""A message to a function, `... to=functions.name <|constrain|>json<|message|>{...}`: GPT-OSS.

Headers come in several orders; `reasoning.harmony` has made one of them before the text comes here.
"""

import re

from text_generation_inference.text.reasoning.harmony import CALL_MESSAGE, CALL_START
from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import EndOfTextError, MalformedCallError, Reader, Steps

_WORD = re.compile(r"\w+")


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    name = yield from reader.take_until(CALL_MESSAGE, MAX_NAME)
    calls.expect(name or None)
    calls.forget()  # the model did not write the head so: it is never shown
    yield from reader.skip_space()
    if name and (yield from _is_empty(reader)):
        calls.start(name)
        calls.arguments("{}")
    else:
        yield from calls.read_arguments(name)


def _is_empty(reader: Reader) -> Steps[bool]:
    """Whether a call has no arguments: nothing, `null` or the next call comes. A `null` is taken."""
    try:
        first = yield from reader.peek()
    except EndOfTextError:
        if reader.cut:
            raise
        return True
    if first == CALL_START[0]:
        return (yield from reader.sees(CALL_START))
    if first != "n":
        return False
    word = yield from reader.take_all(_WORD)
    if word == "null":
        return True
    if reader.cut and reader.position == len(reader.text) and "null".startswith(word):
        raise EndOfTextError
    raise MalformedCallError


_CHANNEL, _CONSTRAIN = "<|channel|>", "<|constrain|>"
_LAYOUT = Layout(
    head=lambda name: (_CHANNEL, f"commentary to=functions.{name} ", _CONSTRAIN, "json", CALL_MESSAGE), single=True
)
FORM = CallForm(
    "harmony", (_CHANNEL, _CONSTRAIN, CALL_MESSAGE), (CALL_START,), _read, _LAYOUT, lambda text: text.strip()
)
