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
from text_generation_inference.api.field_docs import ABOVE_0, REPETITION, WITHIN_2, doc, refused

# -- requests ------------------------------------------------------------------------------------------------------


class Url(msgspec.Struct):
    url: Annotated[str, doc("`http://`, `https://`, or `data:image/png;base64,...`.")]
    detail: Annotated[Any, doc("No effect: the model's own rule decides how much of a picture it sees.")] = None


class TextPart(msgspec.Struct, tag="text"):
    text: str


class ImagePart(msgspec.Struct, tag="image_url"):
    image_url: Annotated[Url | str, doc("Where the picture is.")]

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class PlainImagePart(msgspec.Struct, tag="image", kw_only=True):
    """A picture in the words of `transformers`: where it is, or its bytes in base64."""

    url: str | None = None
    image: str | None = None
    base64: str | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.url, self.image, self.base64)) != 1:
            raise ValueError("an image needs one of `url`, `image` and `base64`")

    def as_url(self) -> ImagePart:
        given = self.url if self.url is not None else self.image
        return ImagePart(given if given is not None else f"data:;base64,{self.base64}")


class VideoPart(msgspec.Struct, tag="video_url", kw_only=True):
    """A video as vLLM's clients send it, for models that take videos."""

    video_url: Annotated[
        Url | str,
        doc("An animated GIF, WebP or PNG, or `data:video/jpeg;base64,` and frames in base64, a comma between them."),
    ]
    fps: Annotated[float | None, doc("Frames per second; left out: what the file says, or 2.")] = None


class PlainVideoPart(msgspec.Struct, tag="video", kw_only=True):
    """A video in the words of `transformers`."""

    video: Annotated[str | list[str], doc("Where its frames are, one after the other, or where an animation is.")]
    fps: Annotated[float | None, doc("Frames per second; left out: what the file says, or 2.")] = None


class RefusalPart(msgspec.Struct, tag="refusal"):
    """What the assistant said instead of an answer."""

    refusal: str


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call the model made earlier. `arguments` is JSON text, or the value itself."""

    name: str
    arguments: Any = UNSET
    parameters: Annotated[
        Any, doc("How to generate. Left out, the model samples; given, even empty, it does not unless asked.")
    ] = UNSET  # TGI's other name for it
    description: str | None = None


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, doc(example="user")]
    content: Annotated[
        str | list[TextPart | ImagePart | PlainImagePart | VideoPart | PlainVideoPart | RefusalPart] | None,
        doc("The text, or its parts, pictures among them where the model sees."),
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str | None, doc("The call that this message answers.")] = None
    reasoning_content: Annotated[str | None, doc("What the model thought before it answered.")] = None
    reasoning: Annotated[Any, doc("Another name of `reasoning_content`.")] = None
    thinking: Annotated[Any, doc("Another name of `reasoning_content`.")] = None
    refusal: str | None = None
    function_call: Annotated[FunctionCall | None, doc("The older form of a call.")] = None  # older than `tool_calls`

    def __post_init__(self) -> None:
        """Refusals become text, functions become tools: that is what templates know. Pictures have one form."""
        if isinstance(self.content, list):
            self.content = [_usual_part(part) for part in self.content]
        if self.content is None and self.refusal is not None:
            self.content = self.refusal
        self.refusal = None
        for thoughts in (self.reasoning, self.thinking):
            if self.reasoning_content is None and isinstance(thoughts, str):
                self.reasoning_content = thoughts
        self.reasoning = self.thinking = None
        if self.function_call is not None:
            self.tool_calls = [
                *(self.tool_calls or []),
                ToolCall(_call_id(self.function_call.name), self.function_call),
            ]
            self.function_call = None
        if self.role == "function":
            self.role, self.tool_call_id = "tool", self.tool_call_id or _call_id(self.name or "")


def _usual_part(
    part: TextPart | ImagePart | PlainImagePart | VideoPart | PlainVideoPart | RefusalPart,
) -> TextPart | ImagePart | VideoPart | PlainVideoPart:
    if isinstance(part, RefusalPart):
        return TextPart(part.refusal)
    return part.as_url() if isinstance(part, PlainImagePart) else part


def _call_id(name: str) -> str:
    """Joins a call of a function and its result, which have no id. Nine characters, as some templates demand."""
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()[:9]


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: Annotated[
        Any, doc("How to generate. Left out, the model samples; given, even empty, it does not unless asked.")
    ] = UNSET
    arguments: Any = UNSET  # TGI's other name for it
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: str = "function"


class FunctionName(msgspec.Struct):
    name: str


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], doc("Functions that the model may call.")]


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """One function (`function`, or `name`), or those that may be called (`allowed_tools`, or `mode` and `tools`)."""

    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]] | None, doc("Functions that the model may call.")] = None

    def __post_init__(self) -> None:
        if self.type == "allowed_tools":
            if self.allowed_tools is None:
                self.allowed_tools = AllowedTools(mode=self.mode, tools=self.tools or [])
        elif self.function is None:
            if self.name is None:
                raise ValueError("missing field `function`")
            self.function = FunctionName(self.name)


class StreamOptions(msgspec.Struct):
    include_usage: Annotated[bool, doc("Send a last part with the token counts.")] = False
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
    grammar: Annotated[Any, refused] = None


class _Sampling(msgspec.Struct, kw_only=True):
    """What both routes share."""

    model: Annotated[str | None, doc("The model. `tgi` and nothing mean the one that is served.")] = None
    frequency_penalty: Annotated[
        float | None,
        doc("Makes a token less likely the more often it has appeared; negative: more likely.", **WITHIN_2),
    ] = None
    presence_penalty: Annotated[
        float | None, doc("Makes tokens that have appeared less likely; negative: more likely.", **WITHIN_2)
    ] = None
    logit_bias: Annotated[
        dict[str, float] | list[float] | None, doc("Token id to a number that is added to its score.")
    ] = None
    max_tokens: Annotated[
        U32 | None,
        doc("At most this many tokens. Without it, as many as the server's limits allow.", example=32, minimum=1),
    ] = None
    n: Annotated[U32 | None, doc("How many answers to generate.", minimum=1, maximum=128)] = None
    seed: Annotated[Annotated[int, Meta(ge=-(2**63))] | None, doc("Makes random choices repeatable.")] = None
    stop: Annotated[str | list[str] | None, doc("Texts that end the generation.")] = None
    stream: Annotated[bool | None, doc("Send the answer in parts as they come.")] = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[
        float | None,
        doc(
            "0: always the most likely token. Below 1: closer to it. Above 1: more varied.",
            example=0.5,
            minimum=0,
            maximum=2,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        doc(
            "Choose among the most likely tokens that together reach this probability.",
            example=0.95,
            **ABOVE_0,
            maximum=1,
        ),
    ] = None
    # Not OpenAI's:
    top_n_sigma: Annotated[
        float | None,
        doc(
            "Choose among the tokens whose score is within so many standard deviations of the best one.",
            example=1.0,
            minimum=0,
            maximum=100,
        ),
    ] = None
    top_k: Annotated[I32 | None, doc("Choose among this many of the most likely tokens.", minimum=-1)] = None
    min_p: Annotated[
        float | None, doc("Leave out tokens less likely than this share of the most likely one.", minimum=0, maximum=1)
    ] = None
    typical_p: Annotated[
        float | None,
        doc(
            "Choose among the tokens of typical information that together reach this probability.",
            example=0.95,
            **ABOVE_0,
            maximum=1,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        doc(
            "Above 1: tokens already in the prompt or the output become less likely. 1: no effect.",
            example=1.03,
            **REPETITION,
        ),
    ] = None
    watermark: Annotated[
        bool | None, doc("Mark the text statistically, so that it can be recognised as generated.")
    ] = None
    truncate: Annotated[U64 | None, doc("Use only this many of the last tokens of the prompt.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None, doc("Another name of `truncate`. -1: as many as the model takes.")
    ] = None  # the same; -1: to what the model takes
    ignore_eos: Annotated[bool | None, doc("Go on after a token that ends the text.")] = None
    cache_salt: Annotated[
        str | None, doc("Cached prefixes and pictures are shared only between requests with the same one.")
    ] = None
    min_tokens: Annotated[U32 | None, doc("No end before so many tokens.")] = None
    max_new_tokens: Annotated[U32 | None, doc("Another name of `max_tokens`.", example=20)] = (
        None  # TGI's name of `max_tokens`
    )
    do_sample: Annotated[bool | None, doc("False, without a `temperature`: always the most likely token.")] = None
    best_of: Annotated[
        U32 | None, doc("Generate this many times and return the one with the best mean log-probability.")
    ] = None
    stop_token_ids: Annotated[list[U32] | None, doc("Token ids that end the text.")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("Keep what ended the text.")] = None
    skip_special_tokens: Annotated[bool | None, doc("Leave special tokens out of the text. The default.")] = None
    add_special_tokens: Annotated[bool | None, doc("Let the tokenizer add its own tokens to the prompt.")] = None
    response_format: Annotated[ResponseFormat | None, doc("What the answer must match.")] = None
    guided_json: Annotated[Any, doc("A JSON schema that the text must match, as an object or as text.")] = None
    guided_regex: Annotated[str | None, doc("A regular expression that the text must match.")] = None
    guided_choice: Annotated[list[str] | None, doc("Texts one of which must come.")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, doc("What the text must match: one of `json`, `regex`, `choice` and `json_object`.")
    ] = None
    guided_grammar: Annotated[Any, refused] = None
    use_beam_search: Annotated[bool | None, refused] = None
    bad_words: Annotated[Any, refused] = None
    allowed_token_ids: Annotated[Any, refused] = None
    logits_processors: Annotated[Any, refused] = None
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
    messages: Annotated[
        list[Message], doc("The conversation so far.", example=[{"role": "user", "content": "What is Deep Learning?"}])
    ]
    max_completion_tokens: Annotated[U32 | None, doc("OpenAI's newer name of `max_tokens`.", minimum=1)] = None
    logprobs: Annotated[bool | None, doc("Return log-probabilities.")] = None
    top_logprobs: Annotated[
        U32 | None, doc("Return this many of the most likely tokens at each place.", maximum=20)
    ] = None
    tools: Annotated[list[Tool] | None, doc("Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | NamedToolChoice | None,
        doc("Whether and what the model must call: `auto`, `none`, `required`, or a function."),
    ] = None
    tool_prompt: Annotated[
        str | None, doc("Put before the tools when the model's template does not show them itself.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, doc("Whether an answer may call more than one function.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Further variables for the chat template.")] = None
    add_generation_prompt: Annotated[bool | None, doc("End the prompt with the start of the assistant's turn.")] = None
    continue_final_message: Annotated[bool | None, doc("Go on with the last message instead of answering it.")] = None
    documents: Annotated[list[dict[str, Any]] | None, doc("Documents for templates that can show them.")] = None
    reasoning_effort: Annotated[
        str | None,
        doc("A variable of the chat template. `none` also turns thinking off, any other value on, where it can be."),
    ] = None
    separate_reasoning: Annotated[
        bool | None, doc("Tell what the model thinks apart from `content`. The default is the server's.")
    ] = None
    include_reasoning: Annotated[bool | None, doc("False: leave out what the model thinks.")] = None
    thinking_token_budget: Annotated[
        I32 | None,
        doc(
            "After so many tokens of thoughts the model is made to end them and to answer. -1: any number.", minimum=-1
        ),
    ] = None
    thinking_budget: Annotated[I32 | None, doc("Another name of `thinking_token_budget`.", minimum=-1)] = None
    verbosity: str | None = None
    prediction: Any = None  # a hint for speed alone
    enable_thinking: Annotated[bool | None, doc("A variable of the chat template.")] = (
        None  # a variable of many templates
    )
    functions: Annotated[list[FunctionDefinition] | None, doc("The older form of `tools`.")] = (
        None  # older than `tools`; the answer has the older form too
    )
    function_call: Annotated[str | FunctionName | None, doc("The older form of `tool_choice`.")] = None
    audio: Annotated[Any, refused] = None
    modalities: Annotated[list[str] | None, doc("Only text is generated.")] = None
    web_search_options: Annotated[Any, refused] = None

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
            if not isinstance(name, str) or name not in known:
                raise ValueError(f"`tool_choice` allows a tool that is not among `tools`: {str(name)[:256]!r}")
            kept.append(known[name])
        self.tools, self.tool_choice = kept, allowed.mode


class CompletionRequest(_Sampling, kw_only=True):
    best_of: Annotated[U32 | None, doc("Generate this many times for each prompt and return the `n` best.")] = None
    max_tokens: Annotated[
        U32 | None, doc("At most this many tokens. 0, with `echo`: only score the prompt.", example=32, minimum=0)
    ] = None
    prompt: Annotated[
        str | list[str | int | list[int]], doc("One or more texts, or token ids.")
    ]  # text or token ids, one or several; not mixed
    echo: Annotated[bool | None, doc("Put the prompt before the text.")] = None
    return_full_text: Annotated[bool | None, doc("Another name of `echo`.")] = None  # TGI's name of `echo`
    logprobs: Annotated[
        U32 | None, doc("Return log-probabilities, and this many of the most likely tokens at each place.")
    ] = None
    suffix: Annotated[str | None, doc("Not supported: put what comes after into the prompt.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo is None:
            self.echo = self.return_full_text


# -- responses -----------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class OutputFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class OutputToolCall(msgspec.Struct):
    id: str
    type: str
    function: OutputFunction


class OutputMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, doc(example="user")] = "assistant"
    content: Annotated[str | None, doc("The text, or its parts.")] = None
    refusal: str | None = None
    reasoning_content: Annotated[str | UnsetType, doc("What the model thought before it answered, if it did.")] = UNSET
    reasoning: Annotated[str | UnsetType, doc("The same, as other servers call it.")] = UNSET
    tool_calls: list[OutputToolCall] | UnsetType = UNSET
    function_call: Annotated[OutputFunction | UnsetType, doc("The older form of a call.")] = UNSET


class ChatCompletionTopLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int]


class ChatCompletionLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: Annotated[
        list[ChatCompletionTopLogprob], doc("Return this many of the most likely tokens at each place.")
    ]


class ChatCompletionLogprobs(msgspec.Struct):
    content: Annotated[list[ChatCompletionLogprob], doc("The text, or its parts.")]
    refusal: None = None


class ChatCompletionComplete(msgspec.Struct):
    index: int
    message: OutputMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: Annotated[str, doc("Why the generation ended.")]


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
    """As TGI's: text or tool calls, never both, and the role with either. Beside thoughts the text is empty."""

    role: Annotated[str, doc(example="user")] = "assistant"
    content: Annotated[str | UnsetType, doc("The text, or its parts.")] = UNSET
    reasoning_content: Annotated[str | UnsetType, doc("More of what the model thinks before it answers.")] = UNSET
    reasoning: Annotated[str | UnsetType, doc("The same, as other servers call it.")] = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET
    function_call: Annotated[Function | UnsetType, doc("The older form of a call.")] = UNSET


class ChatCompletionChoice(msgspec.Struct):
    index: int
    delta: ChatCompletionDelta
    logprobs: ChatCompletionLogprobs | None
    finish_reason: Annotated[str | None, doc("Why the generation ended.")]


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
    top_logprobs: Annotated[
        list[dict[str, float | None] | None] | None, doc("Return this many of the most likely tokens at each place.")
    ]
    text_offset: list[int]


class CompletionComplete(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[str | None, doc("Why the generation ended.")]


class CompletionFinal(msgspec.Struct, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionComplete]
    usage: Usage


class CompletionChunk(msgspec.Struct, tag_field="object", tag="text_completion"):
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
