"""`/v1/completions`: prompts in, OpenAI's text completions out.

Level 8. Several prompts, several choices of each, `best_of`, `echo` and log-probabilities.
"""

import secrets
import time
from dataclasses import dataclass, field
from typing import cast

import msgspec

from tgi.api.call import Call
from tgi.api.choices import FINISH_REASONS, body_model, finite, run_together, start_choices, take_all, usage_of
from tgi.api.errors import UnsupportedError, decode_body, openai_event
from tgi.api.generation import Generation, Piece
from tgi.api.http import DONE, KEEP_ALIVE, HttpError, frame, json_response
from tgi.api.metrics import Timings
from tgi.api.openai_bodies import (
    Chunk,
    CompletionComplete,
    CompletionFinal,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from tgi.api.openai_sampling import num_choices, sampling_params
from tgi.api.service import Permit, Service
from tgi.errors import TgiError, ValidationError
from tgi.text.output import pick_best
from tgi.text.token_bytes import token_text
from tgi.text.tokenizer import Tokenizer

_MAX_LOGPROBS = 5
_decode = msgspec.json.Decoder(CompletionRequest).decode
Prompt = str | list[int]


async def completions(call: Call) -> None:
    await answer_completion(call, decode_body(_decode, await call.request.read_json()))


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
    prompts = _read_prompts(body, service)
    count = num_choices(body, service.config)
    candidates = _num_candidates(body, count)
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


def _read_prompts(body: CompletionRequest, service: Service) -> list[Prompt]:
    if body.suffix is not None:
        text = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise UnsupportedError("suffix", text)
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        where = "Failed to deserialize the JSON body into the target type: prompt: "
        raise HttpError(422, where + "Empty array detected. Do not use an empty array for the prompt.")
    if all(isinstance(item, int) for item in given):
        return [cast(list[int], given)]
    prompts = [item for item in given if not isinstance(item, int)]
    if len(prompts) != len(given) or len({type(item) for item in prompts}) != 1:
        raise ValidationError("`prompt` must hold texts alone, or token ids alone")
    limit = service.config.max_client_batch_size
    if len(prompts) > limit:
        raise UnsupportedError("prompt", f"Number of prompts exceeds the maximum allowed batch size of {limit}")
    return cast(list[Prompt], prompts)


def _num_candidates(body: CompletionRequest, count: int) -> int:
    best_of = body.best_of or count
    if best_of < count:
        raise ValidationError(f"`best_of` must be >= `n`. Given: {best_of} and {count}")
    if (body.best_of or 0) > 20:
        raise ValidationError(f"`best_of` must be <= 20. Given: {best_of}")
    if body.stream and best_of > count:
        raise ValidationError("`best_of` > `n` is not supported when streaming tokens")
    if (body.logprobs or 0) > _MAX_LOGPROBS:
        raise ValidationError(f"`logprobs` must be >= 0 and <= {_MAX_LOGPROBS}. Given: {body.logprobs}")
    return best_of


async def _start(call: Call, completion: _Completion, prompts: list[Prompt], candidates: int, permit: Permit) -> None:
    """Check every prompt before the first one runs: a request that is refused has cost nothing."""
    service, body = call.service, completion.body
    wants_prompt = bool(body.echo) and body.logprobs is not None
    params = sampling_params(body, service.config, body.logprobs or 0, wants_prompt)
    requests = [
        await service.prepare(prompt, params, add_special_tokens=True, truncate=body.truncate) for prompt in prompts
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
        ranked = _best(prompt.generations, completion.count)
        for place, chosen in enumerate(ranked):
            generation = prompt.generations[chosen]
            pieces = pieces_of[generation]
            echo = prompt.text if completion.body.echo else ""
            text = echo + "".join(piece.text for piece in pieces)
            logprobs = None
            if completion.body.logprobs is not None:
                logprobs = _Logprobs(tokenizer, completion.body, generation, prompt.text).of(pieces)
            reason = FINISH_REASONS[generation.finish_reason]
            choices.append(CompletionComplete(number * completion.count + place, text, logprobs, reason))
        for generation in prompt.generations:
            call.succeed(generation)
    answer = CompletionFinal(
        completion.id,
        completion.created,
        completion.model,
        service.fingerprint,
        choices,
        usage_of(completion.generations, len(completion.prompts)),
    )
    headers = call.timing_headers(
        characters, sum(prompt.generations[0].input_length for prompt in completion.prompts), _sum_timings(completion)
    )
    headers.pop("x-compute-time")
    await call.connection.respond(json_response(answer, headers=headers))


def _best(generations: list[Generation], count: int) -> list[int]:
    """The candidates with the highest mean log-probability, in that order; all as they are when none is left out."""
    left = list(range(len(generations)))
    if len(left) == count:
        return left
    ranked: list[int] = []
    while len(ranked) < count:
        means = [generations[number].sum_logprobs / generations[number].num_tokens for number in left]
        ranked.append(left.pop(pick_best(means)))
    return ranked


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
                self._add(result, self._decode(token_id), self._generation.prompt_logprobs.get(place), None)
        for piece in pieces:
            tops = {self._decode(token_id): finite(logprob) for token_id, logprob in piece.top_tokens[: self._count]}
            self._add(result, self._decode(piece.token_id), finite(piece.logprob), tops)
        return result

    def _add(self, result: CompletionLogprobs, token: str, logprob: float | None, tops: dict | None) -> None:
        result.tokens.append(token)
        result.token_logprobs.append(logprob)
        result.text_offset.append(self._offset)
        if result.top_logprobs is not None:
            result.top_logprobs.append(tops)
        self._offset += len(token)

    def _decode(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id)


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
            usage = usage_of(completion.generations, len(completion.prompts))
            await connection.write(frame(_chunk(call, completion, [], usage)))
    except TgiError as error:
        call.fail(error)
        await connection.write(frame(openai_event(error)))
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
            parts = logprobs.of([piece]) if body.logprobs is not None else None
            reason = FINISH_REASONS[generation.finish_reason] if piece.last else None
            choice = CompletionComplete(index, echo + piece.text, parts, reason)
            echo = ""
            frames.append(frame(_chunk(call, completion, [choice])))
        if frames:
            await connection.write(b"".join(frames))
    call.succeed(generation)


def _chunk(call: Call, completion: _Completion, choices: list[CompletionComplete], usage: Usage | None = None) -> Chunk:
    options = completion.body.stream_options
    wants_usage = options is not None and options.include_usage
    return Chunk(
        completion.id,
        completion.created,
        completion.model,
        call.service.fingerprint,
        choices,
        usage if wants_usage else msgspec.UNSET,
    )
