"""Runs a short request before the first real one, so that nobody pays for what happens once.

Level 7.
"""

import time
from contextlib import suppress

from tgi.engine.build import Engine
from tgi.errors import ValidationError
from tgi.types import GenerationRequest, SamplingParams

_PROMPT_TOKENS, _NEW_TOKENS = 8, 3


def warm_up(engine: Engine, grammars: bool = True) -> float:
    """Seconds it took. Raises `EngineError` if the device cannot compute. Leaves nothing in the prefix cache's way."""
    started = time.perf_counter()
    room = engine.facts.max_total_tokens
    new_tokens = min(_NEW_TOKENS, room - 1)
    request = GenerationRequest(
        id=0,
        token_ids=[0] * min(_PROMPT_TOKENS, room - new_tokens),
        sampling=SamplingParams(),
        max_new_tokens=new_tokens,
        stop_token_ids=[],
        seed=0,
        cache_salt="warm-up",
    )
    engine.loop.add(request)
    while engine.loop.has_work:
        engine.loop.step()
    if grammars:
        with suppress(ValidationError):  # a tokenizer that cannot be constrained: each request is told so
            engine.grammars.prepare()
    return time.perf_counter() - started
