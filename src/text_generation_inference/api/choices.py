"""What both `/v1` routes do with their choices: start them, run them together, sum them up."""

from asyncio import TaskGroup
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from text_generation_inference.api.call import Call
from text_generation_inference.api.generation import Generation, OutputText, Piece, openai_text
from text_generation_inference.api.openai_bodies import CompletionTokensDetails, PromptTokensDetails, Usage
from text_generation_inference.api.service import Permit, Service
from text_generation_inference.errors import TgiError, ValidationError
from text_generation_inference.text.output import pick_best
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import GenerationRequest

FINISH_REASONS = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}
MAX_MODEL_NAME = 1024  # characters; every event of a stream has it
T = TypeVar("T")


def body_model(service: Service, given: str | None) -> str:
    """As TGI: `tgi` and nothing are the served model, any other name is taken for it and told back."""
    if given in (None, "", "tgi"):
        return service.model_name
    if len(given) > MAX_MODEL_NAME:
        raise ValidationError(f"`model` must have at most {MAX_MODEL_NAME} characters. Given: {len(given)}")
    return given


def start_choices(
    call: Call,
    request: GenerationRequest,
    permit: Permit,
    count: int,
    generations: list[Generation],
    make_text: Callable[[Tokenizer, GenerationRequest], OutputText] = openai_text,
) -> None:
    """`count` generations of one prompt; with a seed, each its own one from there."""
    seed = request.seed
    for number in range(count):
        call.service.metrics.count_request()
        one = msgspec.structs.replace(request, seed=(seed + number) % 2**64)
        generations.append(call.service.start(one, make_text, call.request.arrived, permit))


def rank_choices(generations: list[Generation], count: int) -> list[int]:
    """Those with the highest mean log-probability, in that order; all as they are when none is left out."""
    left = list(range(len(generations)))
    if len(left) == count:
        return left
    ranked: list[int] = []
    while len(ranked) < count:
        means = [generations[number].sum_logprobs / generations[number].num_tokens for number in left]
        ranked.append(left.pop(pick_best(means)))
    return ranked


async def run_together(runs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all in order, or the first error, which ends the others."""
    try:
        async with TaskGroup() as group:
            tasks = [group.create_task(run) for run in runs]
    except* TgiError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def take_all(generations: list[Generation]) -> list[list[Piece]]:
    """Every piece of all of them. Each is read as it comes: what nobody reads is ended."""
    if len(generations) == 1:
        return [await generations[0].take_all()]
    return await run_together(generation.take_all() for generation in generations)


def num_items(generations: list[Generation]) -> int:
    """What the details of an answer have to tell: each token, and its best ones."""
    return sum(generation.num_tokens * (1 + generation.request.sampling.top_n_tokens) for generation in generations)


def usage_of(service: Service, generations: list[Generation], num_prompts: int = 1, thinks: bool = False) -> Usage:
    """Prompts count once, however many choices they have. `thinks`: thoughts were told from answers."""
    per_prompt = len(generations) // num_prompts
    prompts = generations[::per_prompt]
    prompt_tokens = sum(generation.input_length for generation in prompts)
    completion = sum(generation.num_tokens for generation in generations)
    cached = sum(generation.num_cached_tokens or 0 for generation in prompts)
    details = UNSET if service.config.hide_cached_tokens else PromptTokensDetails(cached)
    thoughts = sum(generation.num_thought_tokens for generation in generations)
    of_completion = CompletionTokensDetails(thoughts) if thinks else UNSET
    return Usage(prompt_tokens, completion, prompt_tokens + completion, details, of_completion)


def finite(value: float) -> float:
    """OpenAI's log-probabilities are numbers, always."""
    return value if value - value == 0 else -9999.0
