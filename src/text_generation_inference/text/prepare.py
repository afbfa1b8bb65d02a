"""From what a caller asks to a `GenerationRequest` that the engine need not check again.

Raises `ValidationError` with the texts TGI's clients know.
"""

import secrets
from collections.abc import Sequence

import msgspec

from text_generation_inference.errors import ContextLengthError, ValidationError
from text_generation_inference.text.picture_prompt import PictureWords, SeenPrompt, encode_seen
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import (
    MIN_TEMPERATURE,
    MIN_TOP_N_SIGMA,
    GenerationRequest,
    Grammar,
    ModelFacts,
    PictureSpan,
    SamplingParams,
)


def prepare_request(
    request_id: int,
    prompt: str | Sequence[int] | SeenPrompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    facts: ModelFacts,
    *,
    add_special_tokens: bool = True,
    truncate: int | None = None,
    cache_salt: str = "",
    chunk: int | None = None,
    grammar: Grammar | None = None,
    words: PictureWords | None = None,
) -> GenerationRequest:
    """Check and tokenise. A prompt is text, token ids, or text with pictures. `words`: those of a model that sees.

    `chunk` is TGI's rule for servers: only the first so many of `max_new_tokens` must fit.
    """
    params.check(facts.vocab_size)
    if params.temperature < MIN_TEMPERATURE:
        params = msgspec.structs.replace(params, temperature=MIN_TEMPERATURE)
    if 0 < params.top_n_sigma < MIN_TOP_N_SIGMA:
        params = msgspec.structs.replace(params, top_n_sigma=MIN_TOP_N_SIGMA)
    if truncate is not None and not 0 < truncate <= facts.max_input_tokens:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {facts.max_input_tokens}. Given: {truncate}"
        )
    if not isinstance(cache_salt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValidationError("`cache_salt` must be a string")
    pictures: list[PictureSpan] = []
    if words is not None and isinstance(prompt, str):
        prompt = SeenPrompt([prompt], [])
    if isinstance(prompt, SeenPrompt):
        assert words is not None
        token_ids, pictures = encode_seen(prompt, words, tokenizer, add_special_tokens, truncate)
    elif isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt, add_special_tokens, truncate)
    else:
        token_ids = list(prompt)[-truncate:] if truncate else list(prompt)
        if words is not None and words.image_id in token_ids:
            raise ValidationError(f"`inputs` holds token id {words.image_id}, which only a picture may bring")
    # A tokenizer may know tokens that the model lacks; one of them may stand for pictures, and no other.
    _check_ids(token_ids, facts.vocab_size, None if words is None else words.image_id)
    if not token_ids:  # an empty text may have a token all the same: the one that some models begin with
        raise ValidationError("`inputs` cannot be empty")
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:  # files may name ids that the model lacks
        stop_ids |= {token_id for token_id in tokenizer.eos_ids if token_id < facts.vocab_size}
    return GenerationRequest(
        id=request_id,
        token_ids=token_ids,
        sampling=params,
        max_new_tokens=_max_new_tokens(len(token_ids), params, facts, chunk),
        stop_token_ids=sorted(stop_ids),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        cache_salt=cache_salt,
        grammar=grammar,
        pictures=pictures,
    )


def _check_ids(token_ids: list[int], vocab_size: int, image_id: int | None) -> None:
    for token_id in token_ids:
        is_id = isinstance(token_id, int) and 0 <= token_id < vocab_size  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_id and token_id != image_id:
            raise ValidationError(
                f"`inputs` holds token id {token_id}, which is outside the vocabulary of {vocab_size}"
            )


def _max_new_tokens(input_length: int, params: SamplingParams, facts: ModelFacts, chunk: int | None) -> int:
    """How many tokens may come. With `chunk` only so many must fit, and what does not fit beyond is cut off."""
    asked = params.max_new_tokens
    room = max(0, facts.max_total_tokens - input_length)
    required = room if asked is None else asked
    if chunk is not None:
        required = min(required, chunk)
    if input_length + required > facts.max_total_tokens:
        raise ContextLengthError(
            f"`inputs` tokens + `max_new_tokens` must be <= {facts.max_total_tokens}."
            f" Given: {input_length} `inputs` tokens and {required} `max_new_tokens`",
            facts.max_total_tokens,
            input_length,
            asked if input_length <= facts.max_total_tokens else None,
        )
    if input_length > facts.max_input_tokens:
        raise ContextLengthError(
            f"`inputs` must have less than {facts.max_input_tokens} tokens. Given: {input_length}",
            facts.max_input_tokens,
            input_length,
            None,
        )
    return room if asked is None else min(asked, room)
