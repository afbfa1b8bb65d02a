"""The bodies of the `/v1` routes: OpenAI's fields, and TGI's own forms of them.

A field nobody knows is ignored; one that is known and not served is declared, to be refused by name. Older and
other names of the same thing are turned into the usual ones here: what reads a body knows one form. Keys are printed in
TGI's order.
"""

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from text_generation_inference.api.bodies import I32, U32, U64, check_u64

# -- requests ------------------------------------------------------------------------------------------------------


class Url(msgspec.Struct):
    url: str


class TextPart(msgspec.Struct, tag="text"):
    text: str


class ImagePart(msgspec.Struct, tag="image_url"):
    image_url: Url


class RefusalPart(msgspec.Struct, tag="refusal"):
    """What the assistant said instead of an answer."""

    refusal: str


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
    content: str | list[TextPart | ImagePart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None  # older than `tool_calls`

    def __post_init__(self) -> None:
        """Refusals become text, functions become tools: that is what templates know."""
        if isinstance(self.content, list):
            self.content = [TextPart(part.refusal) if isinstance(part, RefusalPart) else part for part in self.content]
        if self.content is None and self.refusal is not None:
            self.content = self.refusal
        self.refusal = None
        if self.function_call is not None:
            self.tool_calls = [
                *(self.tool_calls or []),
                ToolCall(_call_id(self.function_call.name), self.function_call),
            ]
            self.function_call = None
        if self.role == "function":
            self.role, self.tool_call_id = "tool", self.tool_call_id or _call_id(self.name or "")


def _call_id(name: str) -> str:
    """Joins a call of a function and its result, which have no id. Nine characters, as some templates demand."""
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()[:9]


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


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]]


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """One function (`function`, or `name`), or those that may be called (`allowed_tools`, or `mode` and `tools`)."""

    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.type == "allowed_tools":
            if self.allowed_tools is None:
                self.allowed_tools = AllowedTools(mode=self.mode, tools=self.tools or [])
        elif self.function is None:
            if self.name is None:
                raise ValueError("missing field `function`")
            self.function = FunctionName(self.name)


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


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """What the text must match, in the words of vLLM."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    grammar: Any = None  # not served


class _Sampling(msgspec.Struct, kw_only=True):
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
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # the same; -1: to what the model takes
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    min_tokens: U32 | None = None
    max_new_tokens: U32 | None = None  # TGI's name of `max_tokens`
    do_sample: bool | None = None
    best_of: U32 | None = None
    stop_token_ids: list[U32] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    # Known and not served:
    guided_grammar: Any = None
    use_beam_search: bool | None = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
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


class ChatRequest(_Sampling, kw_only=True):
    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
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
    enable_thinking: bool | None = None  # a variable of many templates
    functions: list[FunctionDefinition] | None = None  # older than `tools`; the answer has the older form too
    function_call: str | FunctionName | None = None
    # Known and not served:
    audio: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_thinking is not None:
            self.chat_template_kwargs = {"enable_thinking": self.enable_thinking, **(self.chat_template_kwargs or {})}
        if self.functions is not None:
            self._take_functions(self.functions)
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.allowed_tools is not None:
            self._allow_only(self.tool_choice.allowed_tools)

    def _take_functions(self, functions: list[FunctionDefinition]) -> None:
        if self.tools is not None:
            raise ValueError("`functions` and `tools` are two names of one setting: give one of them")
        self.tools = [Tool(function) for function in functions]
        choice = self.function_call
        self.tool_choice = NamedToolChoice(function=choice) if isinstance(choice, FunctionName) else choice
        self.parallel_tool_calls = False  # the older form has room for one call

    def _allow_only(self, allowed: AllowedTools) -> None:
        """The others are as if they had not been given."""
        known = {tool.function.name: tool for tool in self.tools or []}
        kept: list[Tool] = []
        for entry in allowed.tools:
            function: Any = entry.get("function", entry)
            name: Any = function.get("name") if isinstance(function, dict) else None
            if name not in known:
                raise ValueError(f"`tool_choice` allows a tool that is not among `tools`: {name!r}")
            kept.append(known[name])
        self.tools, self.tool_choice = kept, allowed.mode


class CompletionRequest(_Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]  # text or token ids, one or several; not mixed
    echo: bool | None = None
    return_full_text: bool | None = None  # TGI's name of `echo`
    logprobs: U32 | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo is None:
            self.echo = self.return_full_text


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
    function_call: OutputFunction | UnsetType = UNSET


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
    """As TGI's: text or tool calls, never both, and the role with either."""

    role: str = "assistant"
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET


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
