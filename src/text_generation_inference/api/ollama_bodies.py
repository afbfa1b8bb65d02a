"""Bodies of Ollama's API, requests and answers. What is not named here is ignored, as everywhere."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from text_generation_inference.api.bodies import I32


class OllamaOptions(msgspec.Struct, kw_only=True):
    """What of a model's settings a request may change here; others (num_ctx, num_gpu ...) are the server's."""

    num_predict: I32 | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Any = {}
    index: int | UnsetType = UNSET


class OllamaCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: str | UnsetType = UNSET


class OllamaTurn(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: str
    content: str | None = ""  # None as in other APIs, beside calls
    thinking: str | None = None
    images: list[str] | None = None  # in base64
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None  # of a result
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What both routes that generate have."""

    model: str
    stream: bool | None = None  # None: yes
    format: Any = None  # "json", or a schema
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaTurn] | None = None
    tools: list[Any] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None  # older


class OllamaAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the model's, or a part of one."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaLine(msgspec.Struct, kw_only=True):
    """A line of a stream, or the whole answer. `message` on the one route is `response` and `thinking` on the other."""

    model: str
    created_at: str
    message: OllamaAnswer | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET  # this and all durations in nanoseconds
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaError(msgspec.Struct):
    error: str
