"""`/v1/completions`: prompts in, OpenAI's text completions out.

Several prompts, several choices of each, `best_of`, `echo` and log-probabilities.
"""

import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec

from text_generation_inference.api.call import Call
from text_generation_inference.api.choices import (
    FINISH_REASONS,
    body_model,
    finite,
    num_items,
    rank_choices,
    run_together,
    start_choices,
    take_all,
    usage_of,
)
from text_generation_inference.api.errors import BodyError, openai_event
from text_generation_inference.api.generation import Generation, Piece
from text_generation_inference.api.http import DONE, KEEP_ALIVE, frame, json_response
from text_generation_inference.api.metrics import Timings
from text_generation_inference.api.openai_bodies import (
    CompletionChunk,
    CompletionComplete,
    CompletionFinal,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from text_generation_inference.api.openai_sampling import (
    check_served,
    num_candidates,
    num_choices,
    output_grammar,
    prompt_limit,
    sampling_params,
    scores_only,
)
from text_generation_inference.api.service import Permit, Service
from text_generation_inference.api.unknown_fields import BodyForm
from text_generation_inference.errors import TgiError, ValidationError
from text_generation_inference.text.token_bytes import num_characters, token_name, token_text
from text_generation_inference.text.tokenizer import Tokenizer

_MAX_LOGPROBS = 5
_FORM = BodyForm(CompletionRequest)
Prompt = str | list[int]


async def completions(call: Call) -> None:
    await answer_completion(call, await call.read_body(_FORM))


@dataclass(slots=True)
class _Prompt:
    """One prompt and its candidates."""

    text: str  # given back with `echo`
    generations: list[Generation] = field(default_factory=list)


@dataclass(slots=True)
class _Completion:
    body: CompletionRequest
    id: str
    created: int
    model: str
    count: int  # choices of each prompt
    prompts: list[_Prompt]

    @property
    def generations(self) -> list[Generation]:
        return [generation for prompt in self.prompts for generation in prompt.generations]


async def answer_completion(call: Call, body: CompletionRequest) -> None:
    service = call.service
    service.metrics.count_request()
    check_served(body)
    prompts = _read_prompts(body)
    count = num_choices(body, service.config)
    candidates = num_candidates(body, count)
    _check_number(len(prompts), candidates, service)
    if (body.logprobs or 0) > _MAX_LOGPROBS:
        raise ValidationError(f"`logprobs` must be >= 0 and <= {_MAX_LOGPROBS}. Given: {body.logprobs}")
    with service.admit(len(prompts) * candidates) as permit:
        completion = _Completion(
            body, "cmpl-" + secrets.token_hex(12), int(time.time()), body_model(service, body.model), count, []
        )
        await _start(call, completion, prompts, candidates, permit)
        characters = sum(len(prompt.text) for prompt in completion.prompts)
        if body.stream:
            await _stream(call, completion, characters)
        else:
            await _answer(call, completion, characters)


def _read_prompts(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        where = "Failed to deserialize the JSON body into the target type: prompt: "
        text = where + "Empty array detected. Do not use an empty array for the prompt."
        raise BodyError(422, text, "prompt", "invalid_value")
    if all(isinstance(item, int) for item in given):
        return [cast(list[int], given)]
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) != len(given) or len({type(item) for item in prompts}) != 1:
        raise ValidationError("`prompt` must hold texts alone, or token ids alone")
    return prompts


def _check_number(num_prompts: int, candidates: int, service: Service) -> None:
    """More than may run at a time would be turned away for ever."""
    limit = service.config.max_concurrent_requests
    if num_prompts * candidates > limit:
        each = f" with {candidates} answers each" if candidates > 1 else ""
        text = f"`prompt` holds {num_prompts} prompts{each}: at most {limit} may run at a time on this server"
        raise ValidationError(text)


async def _start(call: Call, completion: _Completion, prompts: list[Prompt], candidates: int, permit: Permit) -> None:
    """Check every prompt before the first one runs: a request that is refused has cost nothing."""
    service, body = call.service, completion.body
    wants_prompt = bool(body.echo) and body.logprobs is not None
    params = sampling_params(body, service.config, body.logprobs or 0, wants_prompt)
    grammar = await service.run_beside(lambda: output_grammar(body, service.config), call.request.is_long)
    truncate = prompt_limit(body, service.facts.max_input_tokens)
    special = body.add_special_tokens is not False
    requests = [
        await service.prepare(
            prompt,
            params,
            add_special_tokens=special,
            truncate=truncate,
            grammar=grammar,
            cache_salt=body.cache_salt,
            permit=permit,
            field="prompt",
        )
        for prompt in prompts
    ]
    for prompt, request in zip(prompts, requests, strict=True):
        text = prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt, skip_special_tokens=False)
        one = _Prompt(service.tokenizer.before_output(text))
        completion.prompts.append(one)
        start_choices(call, request, permit, candidates, one.generations)


async def _answer(call: Call, completion: _Completion, characters: int) -> None:
    service = call.service
    tokenizer = service.tokenizer
    choices: list[CompletionComplete] = []
    pieces_of = dict(zip(completion.generations, await take_all(completion.generations), strict=True))
    for number, prompt in enumerate(completion.prompts):
        ranked = rank_choices(prompt.generations, completion.count)
        for place, chosen in enumerate(ranked):
            generation = prompt.generations[chosen]
            pieces = [] if scores_only(completion.body) else pieces_of[generation]
            echo = prompt.text if completion.body.echo else ""
            text = echo + "".join(piece.text for piece in pieces)
            logprobs = None
            if completion.body.logprobs is not None:
                made = _Logprobs(tokenizer, completion.body, generation, prompt.text)
                size = num_items([generation]) + generation.input_length * bool(completion.body.echo)
                logprobs = await service.build(partial(made.of, pieces), size)
            reason = "length" if scores_only(completion.body) else FINISH_REASONS[generation.finish_reason]
            choices.append(CompletionComplete(number * completion.count + place, text, logprobs, reason))
        for generation in prompt.generations:
            call.succeed(generation)
    answer = CompletionFinal(
        completion.id,
        completion.created,
        completion.model,
        service.fingerprint,
        choices,
        _usage(service, completion),
    )
    headers = call.timing_headers(
        characters, sum(prompt.generations[0].input_length for prompt in completion.prompts), _sum_timings(completion)
    )
    headers.pop("x-compute-time")
    await call.connection.respond(json_response(answer, headers=headers))


def _usage(service: Service, completion: _Completion) -> Usage:
    usage = usage_of(service, completion.generations, len(completion.prompts))
    if scores_only(completion.body):
        usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
    return usage


def _sum_timings(completion: _Completion) -> Timings:
    times = [generation.timings for generation in completion.generations if generation.timings is not None]
    return Timings(
        sum(t.total_s for t in times),
        sum(t.validation_s for t in times),
        sum(t.queue_s for t in times),
        sum(t.inference_s for t in times),
        sum(t.generated_tokens for t in times),
    )


class _Logprobs:
    """OpenAI's parallel lists for one choice, whole or in parts."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionRequest, generation: Generation, prompt: str) -> None:
        self._tokenizer, self._count, self._generation = tokenizer, body.logprobs or 0, generation
        self._echo = bool(body.echo)
        self._offset = 0 if self._echo else len(prompt)

    def of(self, pieces: list[Piece]) -> CompletionLogprobs:
        result = CompletionLogprobs([], [], [] if self._count else None, [])
        if self._echo:
            self._echo = False
            for place, token_id in enumerate(self._generation.request.token_ids):
                tops = self._generation.prompt_top_tokens.get(place)
                self._add(result, token_id, self._generation.prompt_logprobs.get(place), tops)
        for piece in pieces:
            self._add(result, piece.token_id, finite(piece.logprob), piece.top_tokens)
        return result

    def _add(
        self, result: CompletionLogprobs, token_id: int, logprob: float | None, tops: list[tuple[int, float]] | None
    ) -> None:
        result.tokens.append(self._name(token_id))
        result.token_logprobs.append(logprob)
        result.text_offset.append(self._offset)
        if result.top_logprobs is not None:
            best = tops[: self._count] if tops is not None else None
            result.top_logprobs.append(
                None if best is None else {self._name(top): finite(value) for top, value in best}
            )
        self._offset += num_characters(self._tokenizer, token_id)

    def _name(self, token_id: int) -> str:
        """As OpenAI: a token that begins or ends inside a character is told byte by byte."""
        name = token_name(self._tokenizer, token_id)
        return name if name == token_text(self._tokenizer, token_id) else "bytes:" + name


# -- streams -------------------------------------------------------------------------------------------------------


async def _stream(call: Call, completion: _Completion, characters: int) -> None:
    connection = call.connection
    await connection.start_events(call.stream_headers(characters))
    call.streams += completion.generations
    try:
        runs = [
            _stream_choice(call, completion, number * completion.count + place, prompt, generation)
            for number, prompt in enumerate(completion.prompts)
            for place, generation in enumerate(prompt.generations)
        ]
        if len(runs) == 1:
            await runs[0]
        else:
            await run_together(runs)
        options = completion.body.stream_options
        if options is not None and options.include_usage:
            await connection.write(frame(_chunk(call, completion, [], _usage(call.service, completion))))
    except TgiError as error:
        call.fail(error)
        await connection.write(frame(openai_event(error, call.request.path)))
    await connection.end_events(DONE)


async def _stream_choice(
    call: Call, completion: _Completion, index: int, prompt: _Prompt, generation: Generation
) -> None:
    connection, body = call.connection, completion.body
    logprobs = _Logprobs(call.service.tokenizer, body, generation, prompt.text)
    echo = prompt.text if body.echo else ""
    while not generation.finish_reason:
        pieces = await generation.take()
        if not pieces:
            await connection.write(KEEP_ALIVE)
            continue
        frames: list[bytes] = []
        for piece in pieces:
            if not (piece.text or piece.last or echo or body.logprobs is not None):
                continue
            text, told = (echo, []) if scores_only(body) else (echo + piece.text, [piece])
            parts = logprobs.of(told) if body.logprobs is not None else None
            reason = None
            if piece.last:
                reason = "length" if scores_only(body) else FINISH_REASONS[generation.finish_reason]
            choice = CompletionComplete(index, text, parts, reason)
            echo = ""
            frames.append(frame(_chunk(call, completion, [choice])))
        if frames:
            await connection.write(b"".join(frames))
    call.succeed(generation)


def _chunk(
    call: Call, completion: _Completion, choices: list[CompletionComplete], usage: Usage | None = None
) -> CompletionChunk:
    options = completion.body.stream_options
    wants_usage = options is not None and options.include_usage
    return CompletionChunk(
        completion.id,
        completion.created,
        completion.model,
        call.service.fingerprint,
        choices,
        usage if wants_usage else msgspec.UNSET,
    )
