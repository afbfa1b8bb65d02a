"""An object or a list of objects, `{"name": ..., "parameters": {...}}`, for models that learnt no form."""

from text_generation_inference.text.tools.form import CallForm, Calls, Layout
from text_generation_inference.text.tools.reader import Steps

LAYOUT = Layout(between=(", ",), key="parameters", lists_several=True, bare_between="\n")


def read_bare(calls: Calls, start: str) -> Steps[None]:
    """Calls without a marker, in a code fence or not."""
    reader = calls.reader
    if start.startswith("```"):
        yield from calls.read_json(calls.names)
        yield from reader.skip_space()
        yield from reader.try_literal("```")
    else:
        yield from calls.read_json(calls.names, start)


FORM = CallForm("json", (), (), read_bare, LAYOUT, bare=True)
