"""A message to a function, `... to=functions.name <|constrain|>json<|message|>{...}`: GPT-OSS.

Headers come in several orders; `reasoning.harmony` has made one of them before the text comes here.
"""

from text_generation_inference.text.reasoning.harmony import CALL_MESSAGE, CALL_START
from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    name = yield from reader.take_until(CALL_MESSAGE, MAX_NAME)
    calls.expect(name or None)
    yield from reader.skip_space()
    yield from calls.read_arguments(name)


_CHANNEL, _CONSTRAIN = "<|channel|>", "<|constrain|>"
_LAYOUT = Layout(
    head=lambda name: (_CHANNEL, f"commentary to=functions.{name} ", _CONSTRAIN, "json", CALL_MESSAGE), single=True
)
FORM = CallForm(
    "harmony", (_CHANNEL, _CONSTRAIN, CALL_MESSAGE), (CALL_START,), _read, _LAYOUT, lambda text: text.strip()
)
