"""Every route of the server: path, function, body, answers, words.

`app` dispatches from this table and `openapi` makes the API document from it, so that what is served and what is said
of it cannot differ. An entry without a summary is served and not documented.
"""

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import msgspec

from text_generation_inference.api import (
    chat,
    cloud,
    completions,
    dashboard,
    info,
    messages,
    native,
    ollama,
    profiler,
    responses,
    static_pages,
)
from text_generation_inference.api.call import Call
from text_generation_inference.api.http import json_response
from text_generation_inference.api.openapi import build_document
from text_generation_inference.config import ServerConfig
from text_generation_inference.version import __version__

Endpoint = Callable[[Call], Awaitable[None]]


class Answer(msgspec.Struct, frozen=True):
    """What comes with one status. `content` maps a media type to a component, `[component]`, or a plain type."""

    status: int
    description: str
    content: dict[str, str] = {}
    example: Any = None
    headers: dict[str, str] = {}


class Route(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str  # `{name}` stands for one part of the path, a last `{name*}` for the rest
    endpoint: Endpoint
    name: str  # of its spans
    public: bool = False  # needs no API key
    operation: str = ""  # of generated clients; the name, unless several routes share it
    group: str = ""  # on the page at /docs
    summary: str = ""
    description: str = ""
    body: str = ""  # component of the request
    example: Any = None
    answers: list[Answer] = []


@cache
def document(sees: bool = False) -> dict[str, Any]:
    """The API document, with a picture in its examples if the model sees."""
    routes = [_with_picture(route) for route in ROUTES] if sees else ROUTES
    return build_document(routes, __version__)


def _with_picture(route: Route) -> Route:
    return msgspec.structs.replace(route, example=_SEEN.get(route.path, route.example))


async def _openapi(call: Call) -> None:
    await call.connection.respond(json_response(document(call.service.pictures is not None)))


_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"

_HEADERS = {
    "x-compute-type": "What the model runs on",
    "x-compute-characters": "Characters of the prompt",
    "x-compute-time": "Total time in seconds",
    "x-total-time": "Total time in ms",
    "x-validation-time": "Time until queued, in ms",
    "x-queue-time": "Time in the queue, in ms",
    "x-inference-time": "Time in the batch, in ms",
    "x-time-per-token": "Inference time per token, in ms",
    "x-prompt-tokens": "Tokens of the prompt",
    "x-generated-tokens": "Tokens generated",
}
_TIMES = "Times and token counts are in the `x-*` headers of the answer."


def _error(status: int, description: str, error: str, kind: str, media: str = _JSON) -> Answer:
    return Answer(status, description, {media: "ErrorResponse"}, {"error": error, "error_type": kind})


def _ok(description: str, content: dict[str, str], headers: dict[str, str] | None = None) -> Answer:
    return Answer(200, description, content, None, headers or {})


_NO_KEY = Answer(401, "The API key is missing or wrong")
# Answered before a body is looked at, as plain text.
_UNREADABLE = [
    Answer(400, "The body is not JSON", {_TEXT: "string"}),
    Answer(408, "The body did not come in time", {_TEXT: "string"}),
    Answer(413, "The body is larger than `--payload-limit`", {_TEXT: "string"}),
    Answer(415, "The content type is not `application/json`", {_TEXT: "string"}),
]
_INVALID = Answer(
    422,
    "The input fails a check (JSON), or the body does not have the fields and types of the schema (text)",
    {_JSON: "ErrorResponse", _TEXT: "string"},
    {"error": "Input validation error: `temperature` must be strictly positive", "error_type": "validation"},
)
_OVERLOADED = _error(429, "Too many requests: try again later", "Model is overloaded", "overloaded")
_NOT_READY = _error(503, "Starting, stopping, or without its engine", "the engine is starting", "unavailable")
_NATIVE = [
    *_UNREADABLE,
    _NO_KEY,
    _INVALID,
    _error(424, "The engine failed", "Request failed during generation: ...", "generation"),
    _OVERLOADED,
    _error(500, "The generation ended before its time", "Incomplete generation", "incomplete_generation"),
    _NOT_READY,
]
# A stream has begun when an input is checked, so errors come as events and the status stays 200.
_STREAM = [*_UNREADABLE, _NO_KEY, Answer(422, "The body does not fit the schema", {_TEXT: "string"}), _NOT_READY]
_TOKENIZE = [*_UNREADABLE, _NO_KEY, _INVALID, _error(500, "A defect of the server", "internal error", "internal")]
_OPENAI = [
    Answer(status, text, {_JSON: "OpenaiErrorResponse"})
    for status, text in (
        (400, "The body is not JSON, does not fit the schema, or fails a check"),
        (401, "The API key is missing or wrong"),
        (408, "The body did not come in time"),
        (413, "The body is larger than `--payload-limit`"),
        (415, "The content type is not `application/json`"),
        (429, "Too many requests: try again later"),
        (500, "The engine failed"),
        (503, "Starting, stopping, or without its engine"),
    )
]
_STORED = [
    Answer(401, "The API key is missing or wrong", {_JSON: "OpenaiErrorResponse"}),
    Answer(404, "It was never stored, or is no longer", {_JSON: "OpenaiErrorResponse"}),
]
_ANTHROPIC = [
    Answer(status, text, {_JSON: "MessagesErrorResponse"})
    for status, text in (
        (400, "The body is not JSON, does not fit the schema, or fails a check"),
        (401, "The API key is missing or wrong"),
        (408, "The body did not come in time"),
        (413, "The body is larger than `--payload-limit`"),
        (415, "The content type is not `application/json`"),
        (500, "The engine failed"),
        (503, "Starting, stopping, or without its engine"),
        (529, "Too many requests: try again later"),
    )
]
_UNHEALTHY = _error(503, "The engine is not there", "unhealthy", "healthcheck")
_HEALTH = [Answer(200, "Requests are served"), _UNHEALTHY]
_LIVE = [_ok("Requests are served", {_JSON: "object"}), Answer(503, "The engine is not there", {_JSON: "object"})]

_INPUTS = "My name is Olivier and I"
_GENERATE = {"inputs": _INPUTS, "parameters": {"max_new_tokens": 20}}
_CHAT = {"messages": [{"role": "user", "content": "What is Deep Learning?"}], "max_tokens": 64}
# A red square on white.
_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX////IHigrioOjAAAAHklEQVR42mNgGFyAkYHhP"
    "wMDAyMDE0xklIHMGGwAAPa7AUAn7aGOAAAAAElFTkSuQmCC"
)
_SHOWN = [{"type": "image_url", "image_url": {"url": _PICTURE}}, {"type": "text", "text": "What is this?"}]
_SEEN = {  # examples of models that see, by path
    "/generate": {"inputs": f"![]({_PICTURE})What is this?\n\n", "parameters": {"max_new_tokens": 20, "details": True}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": _SHOWN}], "max_tokens": 64, "stream": True},
}

_MODEL = "/v2/models/{model_name}/versions/{model_version}"

GENERATE, OPENAI, ANTHROPIC, CLOUDS, SERVER = "Generate", "OpenAI", "Anthropic", "Clouds", "Server"

ROUTES = [
    Route(
        method="POST",
        path="/generate",
        endpoint=native.generate,
        name="generate",
        group=GENERATE,
        summary="Generate text",
        description=f"{_TIMES} Where the model sees, `![](URL)` in `inputs` is a picture.",
        body="GenerateRequest",
        example={"inputs": _INPUTS, "parameters": {"max_new_tokens": 20, "details": True}},
        answers=[_ok("The text", {_JSON: "GenerateResponse"}, _HEADERS), *_NATIVE],
    ),
    Route(
        method="POST",
        path="/generate_stream",
        endpoint=native.generate_stream,
        name="generate_stream",
        group=GENERATE,
        summary="Generate text as a stream of tokens",
        description="Server-sent events, one per token. An error found later is an event with `error` and "
        "`error_type`, and ends the stream; the status stays 200.",
        body="GenerateRequest",
        example=_GENERATE,
        answers=[_ok("The tokens as they come", {_EVENTS: "StreamResponse"}), *_STREAM],
    ),
    Route(
        method="POST",
        path="/",
        endpoint=native.compat_generate,
        name="compat_generate",
        group=GENERATE,
        summary="Generate text, as a stream if `stream` is true",
        description="Without `stream` the answer is a list with one element.",
        body="CompatGenerateRequest",
        example={**_GENERATE, "stream": False},
        answers=[
            _ok("The text, or its tokens as they come", {_JSON: "[GenerateResponse]", _EVENTS: "StreamResponse"}),
            *_NATIVE,
        ],
    ),
    Route(
        method="POST",
        path="/tokenize",
        endpoint=info.tokenize,
        name="tokenize",
        group=GENERATE,
        summary="Split a text into tokens",
        description="`start` and `stop` are places in bytes.",
        body="GenerateRequest",
        example={"inputs": _INPUTS},
        answers=[_ok("The tokens", {_JSON: "TokenizeResponse"}), *_TOKENIZE],
    ),
    Route(
        method="POST",
        path="/chat_tokenize",
        endpoint=info.chat_tokenize,
        name="chat_tokenize",
        operation="get_chat_tokenize",
        group=GENERATE,
        summary="Apply the chat template and split the prompt into tokens",
        body="ChatRequest",
        example=_CHAT,
        answers=[_ok("The prompt and its tokens", {_JSON: "ChatTokenizeResponse"}), *_TOKENIZE],
    ),
    Route(
        method="POST",
        path="/v1/chat/completions",
        endpoint=chat.chat_completions,
        name="chat_completions",
        group=OPENAI,
        summary="Answer a conversation",
        description="OpenAI's chat route. TGI's own forms of `response_format` and tools are accepted too. "
        "A stream ends with `data: [DONE]`. Where the model sees, parts of the type `image_url` are pictures.",
        body="ChatRequest",
        example={**_CHAT, "stream": True},
        answers=[
            _ok(
                "The answer, or its parts as they come",
                {_JSON: "ChatCompletion", _EVENTS: "ChatCompletionChunk"},
                _HEADERS,
            ),
            *_OPENAI,
        ],
    ),
    Route(
        method="POST",
        path="/v1/completions",
        endpoint=completions.completions,
        name="completions",
        group=OPENAI,
        summary="Continue one or more prompts",
        description="OpenAI's text route. A stream ends with `data: [DONE]`.",
        body="CompletionRequest",
        example={"prompt": "Say this is a test.", "max_tokens": 20, "stream": True},
        answers=[
            _ok("The text, or its parts as they come", {_JSON: "CompletionFinal", _EVENTS: "Chunk"}, _HEADERS),
            *_OPENAI,
        ],
    ),
    Route(
        method="POST",
        path="/v1/responses",
        endpoint=responses.create,
        name="create_response",
        group=OPENAI,
        summary="Answer a conversation, or go on with a stored one",
        description="OpenAI's Responses API. Item types, tools and fields that are not known have no effect. The last "
        "answers can be continued by `previous_response_id` (`--responses-store`). A stream has numbered events.",
        body="ResponsesRequest",
        example={"input": "What is Deep Learning?", "max_output_tokens": 64, "stream": True},
        answers=[
            _ok(
                "The answer, or its parts as they come", {_JSON: "ResponsesAnswer", _EVENTS: "ResponsesEvent"}, _HEADERS
            ),
            *_OPENAI,
        ],
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        endpoint=responses.count,
        name="count_input_tokens",
        group=OPENAI,
        summary="Count the tokens of a conversation",
        body="ResponsesRequest",
        example={"input": "What is Deep Learning?"},
        answers=[_ok("How many", {_JSON: "InputTokenCount"}), *_OPENAI],
    ),
    Route(
        method="GET",
        path="/v1/responses/{response_id}",
        endpoint=responses.retrieve,
        name="get_response",
        group=OPENAI,
        summary="A stored response",
        answers=[_ok("The response", {_JSON: "ResponsesAnswer"}), *_STORED],
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{response_id}",
        endpoint=responses.delete,
        name="delete_response",
        group=OPENAI,
        summary="Forget a stored response",
        answers=[_ok("It is gone", {_JSON: "DeletedResponse"}), *_STORED],
    ),
    Route(
        method="GET",
        path="/v1/models",
        endpoint=info.models,
        name="openai_get_model_info",
        public=True,
        group=OPENAI,
        summary="The model that is served",
        answers=[_ok("A list with one model", {_JSON: "ModelsInfo"})],
    ),
    Route(
        method="GET",
        path="/v1/models/{model*}",
        endpoint=info.model,
        name="openai_get_model_info",
        public=True,
        operation="openai_get_model",
        group=OPENAI,
        summary="A model by its name",
        answers=[_ok("The model", {_JSON: "ModelInfo"})],
    ),
    Route(
        method="POST",
        path="/v1/messages",
        endpoint=messages.messages,
        name="messages",
        group=ANTHROPIC,
        summary="Answer a conversation",
        description="Anthropic's Messages API. Any model name means the one that is served. Where it sees, blocks of "
        "the type `image` are pictures. Fields, block types and tools that are not known have no effect.",
        body="MessagesRequest",
        example={"model": "tgi", **_CHAT, "stream": True},
        answers=[
            _ok("The answer, or its parts as they come", {_JSON: "MessagesAnswer", _EVENTS: "MessagesEvent"}, _HEADERS),
            *_ANTHROPIC,
        ],
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        endpoint=messages.count,
        name="count_tokens",
        group=ANTHROPIC,
        summary="Count the tokens of a conversation",
        body="CountTokensRequest",
        example={"model": "tgi", "messages": _CHAT["messages"]},
        answers=[_ok("How many", {_JSON: "TokenCount"}), *_ANTHROPIC],
    ),
    Route(
        method="POST",
        path="/invocations",
        endpoint=cloud.invocations,
        name="sagemaker_compatibility",
        group=CLOUDS,
        summary="Amazon SageMaker: any of the three kinds of request",
        description="A body with `inputs` goes to `/`, one with `messages` to `/v1/chat/completions`, one with "
        "`prompt` to `/v1/completions`.",
        body="SagemakerRequest",
        example=_GENERATE,
        answers=[
            _ok(
                "As the route it goes to",
                {_JSON: "SagemakerResponse", _EVENTS: "SagemakerStreamResponse"},
            ),
            *_NATIVE,
        ],
    ),
    Route(
        method="POST",
        path="/vertex",
        endpoint=cloud.vertex,
        name="vertex_compatibility",
        group=CLOUDS,
        summary="Google Vertex AI: several requests at a time",
        body="VertexRequest",
        example={"instances": [{"inputs": _INPUTS, "parameters": {"max_new_tokens": 20}}]},
        answers=[_ok("A text for each instance", {_JSON: "VertexResponse"}), *_NATIVE],
    ),
    Route(
        method="GET",
        path="/v2",
        endpoint=cloud.kserve_metadata,
        name="kserve_metadata",
        public=True,
        group=CLOUDS,
        summary="KServe: the server",
        answers=[_ok("Name, version and extensions", {_JSON: "object"})],
    ),
    Route(
        method="GET",
        path="/v2/health/live",
        endpoint=cloud.kserve_live,
        name="health",
        public=True,
        operation="kserve_live",
        group=CLOUDS,
        summary="KServe: whether the server is alive",
        answers=_LIVE,
    ),
    Route(
        method="GET",
        path="/v2/health/ready",
        endpoint=cloud.kserve_ready,
        name="health",
        public=True,
        operation="kserve_ready",
        group=CLOUDS,
        summary="KServe: whether the server takes requests",
        answers=_LIVE,
    ),
    Route(
        method="GET",
        path=_MODEL,
        endpoint=cloud.kserve_model,
        name="kserve_model",
        public=True,
        operation="kserve_model_metadata",
        group=CLOUDS,
        summary="KServe: the model",
        answers=[_ok("Name, version and extensions", {_JSON: "object"})],
    ),
    Route(
        method="GET",
        path=f"{_MODEL}/ready",
        endpoint=cloud.kserve_ready,
        name="health",
        public=True,
        operation="kserve_model_ready",
        group=CLOUDS,
        summary="KServe: whether the model takes requests",
        answers=_LIVE,
    ),
    Route(
        method="POST",
        path=f"{_MODEL}/infer",
        endpoint=cloud.kserve_infer,
        name="kserve_infer",
        group=CLOUDS,
        summary="KServe: generate text",
        description="Texts are lists of bytes.",
        body="KserveRequest",
        example={
            "id": "1",
            "inputs": [{"name": "prompt", "shape": [1, 5], "datatype": "BYTES", "data": list(b"Hello")}],
            "outputs": [{"name": "text"}],
        },
        answers=[_ok("The texts", {_JSON: "KserveResponse"}), *_NATIVE],
    ),
    Route(
        method="GET",
        path="/info",
        endpoint=info.info,
        name="get_model_info",
        public=True,
        group=SERVER,
        summary="The model and the limits of the server",
        answers=[_ok("What is served", {_JSON: "Info"})],
    ),
    Route(
        method="GET",
        path="/health",
        endpoint=info.health,
        name="health",
        public=True,
        group=SERVER,
        summary="Whether the server serves",
        answers=_HEALTH,
    ),
    Route(
        method="GET",
        path="/",
        endpoint=static_pages.root,
        name="health",
        public=True,
        operation="root_health",
        group=SERVER,
        summary="As `/health`; for a browser the page of `/chat`",
        answers=_HEALTH,
    ),
    Route(
        method="GET",
        path="/ping",
        endpoint=info.health,
        name="health",
        public=True,
        operation="ping",
        group=SERVER,
        summary="As `/health`",
        answers=_HEALTH,
    ),
    Route(
        method="GET",
        path="/metrics",
        endpoint=info.metrics,
        name="metrics",
        public=True,
        group=SERVER,
        summary="Metrics for Prometheus",
        answers=[_ok("The metrics", {_TEXT: "string"})],
    ),
    Route(
        method="GET",
        path="/docs",
        endpoint=info.docs,
        name="docs",
        public=True,
        group=SERVER,
        summary="This page: all routes, to read and to try",
        answers=[_ok("The page", {"text/html": "string"})],
    ),
    Route(
        method="GET",
        path="/chat",
        endpoint=static_pages.page,
        name="page",
        public=True,
        operation="chat_page",
        group=SERVER,
        summary="A page to talk to the model",
        answers=[_ok("The page", {"text/html": "string"})],
    ),
    Route(
        method="GET",
        path="/dashboard",
        endpoint=static_pages.page,
        name="page",
        public=True,
        operation="dashboard_page",
        group=SERVER,
        summary="A page that shows what the server does, as it does it",
        answers=[_ok("The page", {"text/html": "string"})],
    ),
    Route(
        method="GET",
        path="/api-doc/openapi.json",
        endpoint=_openapi,
        name="openapi",
        public=True,
        group=SERVER,
        summary="This document",
        answers=[_ok("The OpenAPI document", {_JSON: "object"})],
    ),
    Route(method="GET", path="/dashboard/events", endpoint=dashboard.events, name="dashboard_events"),
    Route(method="GET", path="/docs/{rest*}", endpoint=info.docs, name="docs", public=True),
    Route(method="GET", path="/pages/{file*}", endpoint=static_pages.page_file, name="page", public=True),
]

# These ask for a key of their own.
ADMIN_ROUTES = [
    Route(method="POST", path="/start_profile", endpoint=profiler.start, name="start_profile", public=True),
    Route(method="POST", path="/stop_profile", endpoint=profiler.stop, name="stop_profile", public=True),
]

# Where `--ollama-api` asks for them.
OLLAMA_ROUTES = [
    Route(method="POST", path="/api/chat", endpoint=ollama.chat, name="ollama_chat"),
    Route(method="POST", path="/api/generate", endpoint=ollama.generate, name="ollama_generate"),
    Route(method="POST", path="/api/show", endpoint=ollama.show, name="ollama_show", public=True),
    Route(method="GET", path="/api/tags", endpoint=ollama.tags, name="ollama_tags", public=True),
    Route(method="GET", path="/api/ps", endpoint=ollama.running, name="ollama_ps", public=True),
    Route(method="GET", path="/api/version", endpoint=ollama.version, name="ollama_version", public=True),
]


def cloud_routes(config: ServerConfig) -> list[Route]:
    """Where Vertex AI says, by its variables, that it will call."""
    routes: list[Route] = []
    if config.aip_predict_route:
        name = "vertex_compatibility"
        routes.append(Route(method="POST", path=config.aip_predict_route, endpoint=cloud.vertex, name=name))
    if config.aip_health_route:
        path = config.aip_health_route
        routes.append(Route(method="GET", path=path, endpoint=info.health, name="health", public=True))
    return routes
