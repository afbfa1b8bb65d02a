"""Drives the loop of an engine in this process: step by step, so that Ctrl-C finds everything whole.

Knows requests and tokens, and nothing of what is made of them. Does not load torch itself.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

from text_generation_inference.errors import EngineError
from text_generation_inference.interrupt import uninterrupted
from text_generation_inference.types import GenerationRequest, TokenOut

if TYPE_CHECKING:
    from text_generation_inference.engine.loop import EngineLoop


def run_step(
    loop: "EngineLoop",
    wait: Callable[[], object] | None = None,
    receive: Callable[[TokenOut], object] = lambda out: None,
) -> TokenOut | None:
    """The tokens of the step that was due, if one was; `receive` gets them too. Ctrl-C takes effect only while `wait`
    waits for them, or afterwards."""
    with uninterrupted():
        due = loop.launch()
    if not due:
        return None
    (wait or loop.wait)()
    with uninterrupted():
        out = loop.take()
        receive(out)
    return out


def run_requests(
    loop: "EngineLoop",
    requests: Sequence[GenerationRequest],
    name: Callable[[int], str] = lambda request_id: "a request",
    wait: Callable[[], object] | None = None,
) -> Generator[TokenOut, None, None]:
    """The tokens of each step, until all requests have ended. However it is left, none of them stays in the engine.

    Raises `EngineError` if a request fails; `name` says in words which one.
    """
    try:
        for request in requests:
            loop.add(request)
        while loop.has_work:
            out = run_step(loop, wait)
            if out is None:
                continue
            for finish in out.finished:
                if finish.error is not None:
                    raise EngineError(f"{name(finish.request_id)} failed: {finish.error}")
            yield out
    finally:
        for request in requests:
            loop.abort(request.id)
