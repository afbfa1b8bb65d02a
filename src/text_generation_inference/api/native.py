"""TGI's own routes that generate: `/generate`, `/generate_stream` and `/`.

Errors before a stream begins are part of the stream, with status 200, as TGI's clients expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET

from text_generation_inference.api.bodies import (
    BestOfSequence,
    CompatGenerateRequest,
    Details,
    FinishReason,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamResponse,
    Token,
)
from text_generation_inference.api.call import Call
from text_generation_inference.api.choices import num_items, take_all
from text_generation_inference.api.errors import describe
from text_generation_inference.api.generation import Generation, NativeText, Piece
from text_generation_inference.api.http import KEEP_ALIVE, frame, json_response
from text_generation_inference.api.service import Permit
from text_generation_inference.api.unknown_fields import BodyForm
from text_generation_inference.api.validate import check_best_of, check_parameters, check_streamable, native_grammar
from text_generation_inference.errors import TgiError, ValidationError
from text_generation_inference.text.output import pick_best
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import GenerationRequest

Body = GenerateRequest | CompatGenerateRequest
_GENERATE, _COMPAT = BodyForm(GenerateRequest), BodyForm(CompatGenerateRequest)


async def generate(call: Call) -> None:
    body = await call.read_body(_GENERATE)
    response, headers = await _run(call, body)
    await call.connection.respond(json_response(response, headers=headers))


async def generate_stream(call: Call) -> None:
    body = await call.read_body(_GENERATE)
    await _stream(call, body)


async def compat_generate(call: Call) -> None:
    await answer_compat(call, await call.read_body(_COMPAT))


async def answer_compat(call: Call, body: CompatGenerateRequest) -> None:
    """`/`: one answer in a list, or a stream; with the prompt unless told otherwise."""
    if body.parameters.return_full_text is None:
        body.parameters.return_full_text = True  # the model's task on the hub is not known, or text generation
    if body.stream:
        await _stream(call, body)
        return
    response, headers = await _run(call, body)
    await call.connection.respond(json_response([response], headers=headers))


@dataclass(slots=True)
class _Prepared:
    request: GenerationRequest
    prefix: str  # of the answer
    num_characters: int  # of the prompt


async def _prepare(call: Call, body: Body, permit: Permit) -> _Prepared:
    """From here on `inputs` is kept only if it is given back: pictures in it may have megabytes."""
    inputs, body.inputs = body.inputs, ""
    prefix = call.service.tokenizer.before_output(inputs) if body.parameters.return_full_text else ""
    prepared = _Prepared(await _tokenize(call, inputs, body.parameters, permit), prefix, len(inputs))
    if not prefix:
        del inputs
        call.request.free_body()
    return prepared


async def _tokenize(call: Call, inputs: str, parameters: GenerateParameters, permit: Permit) -> GenerationRequest:
    service = call.service
    params = check_parameters(parameters, inputs, service.config, service.facts)
    try:
        grammar = await service.run_beside(
            lambda: native_grammar(parameters.grammar, service.config), call.request.is_long
        )
    except ValidationError:  # lengths come first in TGI's order
        salt = parameters.cache_salt
        await service.prepare(inputs, params, truncate=parameters.truncate, cache_salt=salt, permit=permit)
        raise
    return await service.prepare(
        inputs,
        params,
        truncate=parameters.truncate,
        grammar=grammar,
        cache_salt=parameters.cache_salt,
        permit=permit,
    )


# -- whole answers -------------------------------------------------------------------------------------------------


async def _run(call: Call, body: Body) -> tuple[GenerateResponse, dict[str, str]]:
    service, parameters = call.service, body.parameters
    service.metrics.count_request()
    best_of = check_best_of(parameters, service.config)
    with service.admit(best_of) as permit:
        prepared = await _prepare(call, body, permit)
        prefix, request, arrived = prepared.prefix, prepared.request, call.request.arrived
        generations = [service.start(request, NativeText, arrived, permit, best_of > 1) for _ in range(best_of)]
        outcomes = await take_all(generations)
        best = pick_best([generation.sum_logprobs / generation.num_tokens for generation in generations])
        call.succeed(generations[best])
    chosen = generations[best]
    response = GenerateResponse(prefix + _text(chosen))

    def tell() -> Details:
        details = _details(service.tokenizer, chosen, outcomes[best])
        if best_of > 1:
            details.best_of_sequences = [
                _sequence(service.tokenizer, generation, pieces, prefix)
                for number, (generation, pieces) in enumerate(zip(generations, outcomes, strict=True))
                if number != best
            ]
        return details

    if parameters.details or parameters.decoder_input_details:
        size = num_items(generations) + chosen.input_length * parameters.decoder_input_details
        response.details = await service.build(tell, size)
    assert chosen.timings is not None
    return response, call.timing_headers(prepared.num_characters, chosen.input_length, chosen.timings)


def _text(generation: Generation) -> str:
    assert isinstance(generation.text, NativeText)
    return generation.text.generated


def _details(tokenizer: Tokenizer, generation: Generation, pieces: Sequence[Piece]) -> Details:
    tops = [_top_tokens(tokenizer, piece) for piece in pieces] if generation.request.sampling.top_n_tokens else UNSET
    return Details(
        _reason(generation),
        generation.num_tokens,
        generation.seed,
        _prefill(tokenizer, generation),
        [_token(piece) for piece in pieces],
        UNSET,
        tops,
    )


def _sequence(tokenizer: Tokenizer, generation: Generation, pieces: Sequence[Piece], prefix: str) -> BestOfSequence:
    details = _details(tokenizer, generation, pieces)
    return BestOfSequence(
        prefix + _text(generation),
        details.finish_reason,
        details.generated_tokens,
        details.seed,
        details.prefill,
        details.tokens,
        details.top_tokens,
    )


def _prefill(tokenizer: Tokenizer, generation: Generation) -> list[PrefillToken]:
    """The prompt's tokens with their log-probabilities, if they were asked for; the first has none."""
    if not generation.request.sampling.decoder_input_details:
        return []
    return [
        PrefillToken(
            token_id, tokenizer.decode([token_id], False), _finite(generation.prompt_logprobs.get(place, float("nan")))
        )
        for place, token_id in enumerate(generation.request.token_ids)
    ]


def _reason(generation: Generation) -> FinishReason:
    return cast(FinishReason, generation.finish_reason)


def _token(piece: Piece) -> Token:
    return Token(piece.token_id, piece.text, _finite(piece.logprob), piece.special)


def _top_tokens(tokenizer: Tokenizer, piece: Piece) -> list[Token]:
    return [
        Token(token_id, tokenizer.decode([token_id], False), _finite(logprob), token_id in tokenizer.special_ids)
        for token_id, logprob in piece.top_tokens
    ]


def _finite(value: float) -> float | None:
    return value if value - value == 0 else None


# -- streams -------------------------------------------------------------------------------------------------------


async def _stream(call: Call, body: Body) -> None:
    service, connection, parameters = call.service, call.connection, body.parameters
    await connection.start_events(call.stream_headers(len(body.inputs)))
    service.metrics.count_request()
    try:
        with service.admit() as permit:
            check_streamable(parameters)
            prepared = await _prepare(call, body, permit)
            generation = service.start(prepared.request, NativeText, call.request.arrived, permit)
            call.streams.append(generation)
            await _write_pieces(call, generation, prepared.prefix, parameters.details)
            call.succeed(generation)
    except TgiError as error:
        call.fail(error)
        await connection.write(frame(describe(error)))
    await connection.end_events()


async def _write_pieces(call: Call, generation: Generation, prefix: str, wants_details: bool) -> None:
    connection, tokenizer = call.connection, call.service.tokenizer
    index = 0
    while not generation.finish_reason:
        pieces = await generation.take()
        if not pieces:
            await connection.write(KEEP_ALIVE)
            continue
        frames: list[bytes] = []
        for piece in pieces:
            index += 1
            event = StreamResponse(index, _token(piece))
            if piece.top_tokens:
                event.top_tokens = _top_tokens(tokenizer, piece)
            if piece.last:
                event.generated_text = prefix + _text(generation)
                if wants_details:
                    event.details = StreamDetails(
                        _reason(generation), generation.num_tokens, generation.seed, generation.input_length
                    )
            frames.append(frame(event))
        await connection.write(frames[0] if len(frames) == 1 else b"".join(frames))
