"""The bodies of the `/v1` routes: OpenAI's fields, and TGI's own forms of them.

Level 8. A field nobody knows is refused by name; so is one that OpenAI has and this server does not, unless leaving it
out changes no answer. Keys are printed in TGI's order.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgi.api.bodies import I32, U32, U64, check_u64

# -- requests ------------------------------------------------------------------------------------------------------


class Url(msgspec.Struct):
    url: str


class TextPart(msgspec.Struct, tag="text"):
    text: str


class ImagePart(msgspec.Struct, tag="image_url"):
    image_url: Url


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call the model made earlier. `arguments` is JSON text, or the value itself."""

    name: str
    arguments: Any = UNSET
    parameters: Any = UNSET  # TGI's other name for it
    description: str | None = None


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: Any = UNSET
    arguments: Any = UNSET  # TGI's other name for it
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: str = "function"


class FunctionName(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    function: FunctionName
    type: str = "function"


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # no effect: nothing is padded


class JsonSchemaConfig(msgspec.Struct, kw_only=True):
    schema: Any = UNSET
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's forms (`json_schema` member) and TGI's (`value` member)."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaConfig | None = None
    value: Any = UNSET


class _Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both routes share."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | list[float] | None = None
    max_tokens: U32 | None = None
    n: U32 | None = None
    seed: Annotated[int, Meta(ge=-(2**63))] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Not OpenAI's:
    top_k: I32 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    watermark: bool | None = None
    truncate: U64 | None = None
    ignore_eos: bool | None = None
    # No effect on the answer here:
    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def __post_init__(self) -> None:
        check_u64(seed=self.seed, truncate=self.truncate)


class ChatRequest(_Sampling, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    tool_prompt: str | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: Any = None  # a hint for speed alone
    # Known and not served:
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None


class CompletionRequest(_Sampling, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]  # text or token ids, one or several; not mixed
    best_of: U32 | None = None
    echo: bool | None = None
    logprobs: U32 | None = None
    suffix: str | None = None


# -- responses -----------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class OutputFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class OutputToolCall(msgspec.Struct):
    id: str
    type: str
    function: OutputFunction


class OutputMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[OutputToolCall] | UnsetType = UNSET


class ChatCompletionTopLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int]


class ChatCompletionLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[ChatCompletionTopLogprob]


class ChatCompletionLogprobs(msgspec.Struct):
    content: list[ChatCompletionLogprob]
    refusal: None = None


class ChatCompletionComplete(msgspec.Struct):
    index: int
    message: OutputMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionComplete]
    usage: Usage


class Function(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class DeltaToolCall(msgspec.Struct):
    """The first of a call has its id, type and name; the others only more of the arguments."""

    index: int
    id: str | UnsetType
    type: str | UnsetType
    function: Function


class ChatCompletionDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatCompletionChoice(msgspec.Struct):
    index: int
    delta: ChatCompletionDelta
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(msgspec.Struct, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatCompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class CompletionComplete(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionFinal(msgspec.Struct, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage


class Chunk(msgspec.Struct, tag_field="object", tag="text_completion"):
    """A part of a streamed completion."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage | UnsetType | None = UNSET


class ModelInfo(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str


class ModelsInfo(msgspec.Struct):
    object: str
    data: list[ModelInfo]


class OpenaiError(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenaiErrorResponse(msgspec.Struct):
    error: OpenaiError
