"""Routes that hosting services call: SageMaker, Vertex AI, KServe.

They dispatch to the other routes or run one prompt per instance.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from text_generation_inference.api.bodies import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateParameters,
    KserveOutput,
    KserveRequest,
    KserveResponse,
    VertexInstance,
    VertexParameters,
    VertexRequest,
    VertexResponse,
)
from text_generation_inference.api.call import Call
from text_generation_inference.api.chat import answer_chat
from text_generation_inference.api.chat_prompt import plan_chat
from text_generation_inference.api.choices import run_together
from text_generation_inference.api.completions import answer_completion
from text_generation_inference.api.errors import decode_body, decode_error
from text_generation_inference.api.generation import NativeText, OutputText
from text_generation_inference.api.http import HttpError, Response, json_response
from text_generation_inference.api.native import answer_compat
from text_generation_inference.api.openai_bodies import ChatRequest, CompletionRequest
from text_generation_inference.api.service import Permit, Prompt
from text_generation_inference.api.unknown_fields import unknown_names
from text_generation_inference.api.validate import check_parameters
from text_generation_inference.errors import TgiError
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import GenerationRequest, Grammar, SamplingParams
from text_generation_inference.version import TGI_VERSION

_FORMS: list[tuple[type[msgspec.Struct], str, Callable[[Call, Any], Awaitable[None]]]] = [
    (CompatGenerateRequest, "inputs", answer_compat),
    (ChatRequest, "messages", answer_chat),
    (CompletionRequest, "prompt", answer_completion),
]


async def invocations(call: Call) -> None:
    """SageMaker: the body's fields say which route is meant."""
    value = _parse(await call.request.read_json())
    reason = "it needs `inputs`, `messages` or `prompt`"
    for kind, field, answer in _FORMS:
        if isinstance(value, dict) and field in value:
            try:
                body = msgspec.convert(value, kind)
            except (msgspec.ValidationError, RecursionError) as error:
                reason = str(decode_error(error)).rpartition("target type: ")[2]
                continue
            call.service.unknown_fields.note(unknown_names(value, kind))
            await answer(call, body)
            return
    raise HttpError(
        422,
        "Failed to deserialize the JSON body into the target type: data did not match any variant of untagged enum"
        f" SagemakerRequest: {reason}",
    )


def _parse(data: bytes) -> Any:
    return decode_body(msgspec.json.decode, data)


# -- Vertex AI -----------------------------------------------------------------------------------------------------


async def vertex(call: Call) -> None:
    service = call.service
    service.metrics.count_request()
    value = _parse(await call.request.read_json())
    try:
        instances = [_as_instance(call, item) for item in msgspec.convert(value, VertexRequest).instances]
    except (msgspec.ValidationError, RecursionError) as error:
        raise decode_error(error) from None
    if not instances:
        error = ErrorResponse("Input validation error", "Input validation error")
        call.refuse(422, "instances")
        await call.connection.respond(json_response(error, 422))
        return
    with service.admit(len(instances)) as permit:
        try:
            texts = await run_together(_predict(call, instance, permit) for instance in instances)
        except TgiError as error:
            response = incomplete()
            call.fail(error, response.status)
            await call.connection.respond(response)
            return
    await call.connection.respond(json_response(VertexResponse(texts)))


def incomplete() -> Response:
    return json_response(ErrorResponse("Incomplete generation", "Incomplete generation"), 500)


def _as_instance(call: Call, item: Any) -> VertexInstance | ChatRequest:
    kind = ChatRequest if isinstance(item, dict) and "messages" in item else VertexInstance
    instance = msgspec.convert(item, kind)
    call.service.unknown_fields.note(unknown_names(item, kind))
    return instance


async def _predict(call: Call, instance: VertexInstance | ChatRequest, permit: Permit) -> str:
    service = call.service
    if not isinstance(instance, ChatRequest):
        params = _plain_params(call, instance.inputs, instance.parameters)
        salt = instance.parameters.cache_salt if instance.parameters is not None else None
        return await _generate(call, instance.inputs, params, permit, cache_salt=salt)
    plan = await plan_chat(service, instance, call.request.is_long)
    make_text = NativeText if plan.reasoning is None else plan.open_text  # a prediction has no place for thoughts
    return await _generate(
        call, plan.given, plan.params, permit, False, plan.grammar, instance.cache_salt, make_text, "messages"
    )


def _plain_params(call: Call, prompt: str, given: VertexParameters | None) -> SamplingParams:
    given = given or VertexParameters()
    parameters = GenerateParameters(do_sample=True, max_new_tokens=given.max_new_tokens, seed=given.seed)
    return check_parameters(parameters, prompt, call.service.config, call.service.facts)


async def _generate(
    call: Call,
    prompt: Prompt,
    params: SamplingParams,
    permit: Permit,
    add_special_tokens: bool = True,
    grammar: Grammar | None = None,
    cache_salt: str | None = None,
    make_text: Callable[[Tokenizer, GenerationRequest], OutputText] = NativeText,
    field: str = "inputs",
) -> str:
    service = call.service
    service.metrics.count_request()
    request = await service.prepare(
        prompt,
        params,
        add_special_tokens=add_special_tokens,
        grammar=grammar,
        cache_salt=cache_salt,
        permit=permit,
        field=field,
    )
    generation = service.start(request, make_text, call.request.arrived, permit)
    pieces = await generation.take_all()
    call.succeed(generation)
    text = generation.text
    return text.generated if isinstance(text, NativeText) else "".join(piece.text for piece in pieces)


# -- KServe v2 -----------------------------------------------------------------------------------------------------


async def kserve_live(call: Call) -> None:
    """This process answers; whether it has an engine is what `ready` tells."""
    await call.connection.respond(json_response({"live": True}))


async def kserve_ready(call: Call) -> None:
    if call.service.healthy:
        await call.connection.respond(json_response({"live": True}))
    else:
        await call.connection.respond(json_response({"live": False}, 503))


async def kserve_metadata(call: Call) -> None:
    extensions = ["health", "models", "metrics"]
    name = "text-generation-inference"
    await call.connection.respond(json_response({"name": name, "version": TGI_VERSION, "extensions": extensions}))


async def kserve_model(call: Call) -> None:
    name, version = call.request.variables
    await call.connection.respond(json_response({"name": name, "version": version, "extensions": ["infer", "ready"]}))


async def kserve_infer(call: Call) -> None:
    try:
        body = msgspec.convert(_parse(await call.request.read_json()), KserveRequest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise decode_error(error) from None
    if len(body.inputs) != len(body.outputs):
        error = ErrorResponse("Inputs and outputs length mismatch", "length mismatch")
        call.refuse(422, "outputs")
        await call.connection.respond(json_response(error, 422))
        return
    try:
        prompts = [bytes(item.data).decode() for item in body.inputs]
    except UnicodeDecodeError as error:
        call.refuse(422, "inputs")
        await call.connection.respond(json_response(ErrorResponse(str(error), "utf8"), 422))
        return
    with call.service.admit(max(1, len(prompts))) as permit:
        try:
            params = [_plain_params(call, prompt, body.parameters) for prompt in prompts]
            salt = body.parameters.cache_salt if body.parameters is not None else None
            texts = await run_together(
                _generate(call, prompt, one, permit, cache_salt=salt)
                for prompt, one in zip(prompts, params, strict=True)
            )
        except TgiError as error:
            response = incomplete()
            call.fail(error, response.status)
            await call.connection.respond(response)
            return
    outputs = [
        KserveOutput(output.name, [1, len(data)], "BYTES", list(data))
        for output, data in zip(body.outputs, (text.encode() for text in texts), strict=True)
    ]
    await call.connection.respond(json_response(KserveResponse(body.id, outputs)))
