"""Runs requests before the first real one, so that nobody pays for what happens once."""

import time
from contextlib import suppress

from text_generation_inference.engine.build import Engine
from text_generation_inference.errors import ModelFormatError, ValidationError
from text_generation_inference.types import GenerationRequest, SamplingParams

_PROMPT_TOKENS, _NEW_TOKENS = 8, 3


def warm_up(engine: Engine, grammars: bool = True) -> float:
    """Seconds it took. Raises `EngineError` if the device cannot compute, `ModelFormatError` if the
    model's scores are not finite. Leaves nothing in the prefix cache's way."""
    started = time.perf_counter()
    resolved = engine.resolved
    new_tokens = min(_NEW_TOKENS, resolved.max_total_tokens - 1)
    _run(engine, [min(_PROMPT_TOKENS, resolved.max_total_tokens - new_tokens)], new_tokens)
    if engine.rank.device.limits.runs_ahead and engine.rank.bucket_stats is not None:
        # The largest step takes its memory before it is needed.
        longest = min(resolved.max_input_tokens, resolved.max_batch_prefill_tokens)
        count = min(resolved.max_batch_size, resolved.max_batch_prefill_tokens // longest)
        _run(engine, [longest] * count, 1)
    if grammars:
        with suppress(ValidationError):  # a tokenizer that cannot be constrained: each request is told so
            engine.grammars.prepare()
    return time.perf_counter() - started


def _run(engine: Engine, lengths: list[int], new_tokens: int) -> None:
    for number, length in enumerate(lengths):
        request = GenerationRequest(
            id=number,
            token_ids=[0] * length,
            sampling=SamplingParams(),
            max_new_tokens=new_tokens,
            stop_token_ids=[],
            seed=0,
            cache_salt=f"warm-up {number}",
        )
        engine.loop.add(request)
    while engine.loop.has_work:
        out = engine.loop.step()
        failed = [finish for finish in out.finished if finish.reason == "error"] if out is not None else []
        if failed:
            raise ModelFormatError(
                f"{engine.facts.model_id}: the first steps failed: {failed[0].error}. The weights are damaged (NaN or"
                f" infinite values), or too large for {engine.facts.dtype}: download them again or change `dtype`."
            )
