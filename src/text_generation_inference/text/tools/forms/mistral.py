"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or since its eleventh tokenizer `[TOOL_CALLS]name[ARGS]{...}`."""

import re

from text_generation_inference.text.tools.form import MAX_NAME, CallForm, Calls, Layout, json_cut_name
from text_generation_inference.text.tools.reader import Steps

_START, _ID, _ARGS = MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_NAME = re.compile(r"[\w.-]+")


def _read(calls: Calls, start: str) -> Steps[None]:
    reader = calls.reader
    yield from reader.skip_space()
    if (yield from reader.peek()) in "[{":
        yield from calls.read_json(None)
        return
    name = yield from reader.take_all(_NAME)
    known = bool(name) and reader.position < len(reader.text)
    calls.expect(name if known else None)
    if (yield from reader.try_literal(_ID)):
        yield from reader.take_until(_ARGS, MAX_NAME)
    else:
        yield from reader.try_literal(_ARGS)
    yield from reader.skip_space()
    yield from calls.read_arguments(name)


def _cut_name(text: str) -> str:
    return text if _NAME.fullmatch(text) else json_cut_name(text)


_LISTED = Layout(between=(", ",), opening=(_START, "["), closing=("]",))
_NAMED = Layout(before=(_START,), head=lambda name: (name, _ARGS))
FORM = CallForm("mistral", MARKERS, (_START,), _read, _LISTED, _cut_name, short_ids=True)
WITH_ARGS = CallForm("mistral_args", MARKERS, (_START,), _read, _NAMED, _cut_name, short_ids=True)
