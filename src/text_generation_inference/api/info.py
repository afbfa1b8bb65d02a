"""Routes that tell: health, info, models, metrics, tokens, documentation."""

from importlib.resources import files

import msgspec
from msgspec import UNSET, UnsetType

from text_generation_inference.api.bodies import ErrorResponse, GenerateRequest, Info, PictureInfo, ReplicaInfo
from text_generation_inference.api.call import Call
from text_generation_inference.api.chat_prompt import render_chat
from text_generation_inference.api.engines import Engines
from text_generation_inference.api.errors import openai_plain
from text_generation_inference.api.http import Response, json_response
from text_generation_inference.api.messages_bodies import AnthropicModel, AnthropicModels
from text_generation_inference.api.metrics import CONTENT_TYPE
from text_generation_inference.api.openai_bodies import ChatRequest, ModelInfo, ModelsInfo
from text_generation_inference.api.service import Service
from text_generation_inference.api.tokens import answer_tokens, write_prompt
from text_generation_inference.api.unknown_fields import BodyForm
from text_generation_inference.version import TGI_VERSION, __version__

_GENERATE, _CHAT = BodyForm(GenerateRequest), BodyForm(ChatRequest)


async def health(call: Call) -> None:
    await call.connection.respond(Response(200) if call.service.healthy else unhealthy())


def unhealthy() -> Response:
    return json_response(ErrorResponse("unhealthy", "healthcheck"), 503)


async def info(call: Call) -> None:
    config, facts = call.service.config, call.service.facts
    num_shard = config.num_shard or 1
    await call.connection.respond(
        json_response(
            Info(
                model_id=call.service.model_name,
                model_sha=facts.sha,
                model_pipeline_tag=None,
                max_concurrent_requests=config.max_concurrent_requests,
                max_best_of=config.max_best_of,
                max_stop_sequences=config.max_stop_sequences,
                max_input_tokens=facts.max_input_tokens,
                max_total_tokens=facts.max_total_tokens,
                validation_workers=config.validation_workers,
                max_client_batch_size=config.max_client_batch_size,
                router="text-generation-router",
                version=TGI_VERSION,
                sha=None,
                docker_label=None,
                server_version=__version__,
                quantization=facts.quantization or UNSET,
                weight_bytes=facts.weight_bytes if facts.quantization else UNSET,
                num_shard=num_shard if num_shard > 1 else UNSET,
                model_device_type=facts.device if "emulated" in facts.device else UNSET,
                pictures=_describe_pictures(call.service),
                replicas=_describe_replicas(call.service.engines) if call.service.engines.are_several else UNSET,
            )
        )
    )


def _describe_pictures(service: Service) -> PictureInfo | UnsetType:
    config, policy = service.config, service.facts.pictures
    if service.pictures is None:
        return UNSET
    return PictureInfo(
        tokens=service.pictures.costs,
        max_images_per_request=config.max_images_per_request,
        max_image_pixels=config.max_image_pixels,
        max_image_fetch_size=config.max_image_fetch_size,
        urls=config.media_urls,
        payload_limit=service.payload_limit,
        max_cached_pictures=policy.max_features // policy.cross_rows if policy and policy.cross_rows else UNSET,
    )


def _describe_replicas(engines: Engines) -> list[ReplicaInfo]:
    return [ReplicaInfo(link.state, *engines.work_of(link)) for link in engines.links]


async def models(call: Call) -> None:
    name = call.service.model_name
    if "anthropic-version" in call.request.headers:  # its clients send it always, and nobody else does
        await call.connection.respond(json_response(AnthropicModels([_anthropic_model(name)], False, name, name)))
        return
    await call.connection.respond(json_response(ModelsInfo("list", [ModelInfo(name, "model", 0, name)])))


async def model(call: Call) -> None:
    """One model by its name. There is one."""
    name = call.service.model_name
    if call.request.variables[0] not in (name, call.service.facts.model_id, "tgi"):
        text = f"The model '{call.request.variables[0]}' does not exist"
        await call.connection.respond(openai_plain(404, text, code="model_not_found"))
        return
    is_anthropic = "anthropic-version" in call.request.headers
    described = _anthropic_model(name) if is_anthropic else ModelInfo(name, "model", 0, name)
    await call.connection.respond(json_response(described))


def _anthropic_model(name: str) -> AnthropicModel:
    return AnthropicModel(name, name, "1970-01-01T00:00:00Z")


async def metrics(call: Call) -> None:
    await call.connection.respond(Response(200, call.service.render_metrics(), CONTENT_TYPE))


async def tokenize(call: Call) -> None:
    body = await call.read_body(_GENERATE)
    with call.service.admit() as permit:
        salt = body.parameters.cache_salt
        text, special = await write_prompt(call.service, body.inputs, "inputs", True, permit, salt)
        await answer_tokens(call, text, "inputs", special)


async def chat_tokenize(call: Call) -> None:
    call.service.metrics.count_request()
    body = await call.read_body(_CHAT)
    with call.service.admit() as permit:
        prompt = await render_chat(call.service, body, call.request.is_long)
        given = prompt.pictures or prompt.text
        text, special = await write_prompt(call.service, given, "messages", False, permit, body.cache_salt)
        after = b',"templated_text":' + msgspec.json.encode(prompt.text) + b"}"
        await answer_tokens(call, text, "messages", special, b'{"tokenize_response":', after)


async def docs(call: Call) -> None:
    page = files("text_generation_inference.api").joinpath("docs.html").read_bytes()
    await call.connection.respond(Response(200, page, "text/html; charset=utf-8"))
