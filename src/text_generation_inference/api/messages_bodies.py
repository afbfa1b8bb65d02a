"""The bodies of Anthropic's Messages API.

What a content block or a tool holds depends on its type, and new types come every few weeks: they are plain objects
here, and `messages_request` reads those it knows. A field nobody knows is ignored.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from text_generation_inference.api.bodies import U32
from text_generation_inference.api.field_docs import ABOVE_0, doc

# -- requests ------------------------------------------------------------------------------------------------------


class AnthropicTurn(msgspec.Struct, kw_only=True):
    role: Annotated[Literal["user", "assistant", "system"], doc(example="user")]
    content: Annotated[
        str | list[dict[str, Any]],
        doc("The text, or blocks by `type`: `text`, `image`, `document`, `tool_use`, `tool_result`, `thinking`."),
    ]


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, doc("Of the tool that must be called, with the type `tool`.")] = None
    disable_parallel_tool_use: Annotated[bool | None, doc("True: one call at most.")] = None

    def __post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            raise ValueError("missing field `name`")


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Annotated[str, doc("`enabled` and `adaptive` turn thinking on, `disabled` off, where the model can.")]
    budget_tokens: Annotated[U32 | None, doc("After so many tokens thoughts end.")] = None
    display: Annotated[str | None, doc("`omitted`: thinking blocks are left out.")] = None


class OutputSchema(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: Any


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Annotated[str | None, doc("A variable of the chat template, `reasoning_effort`.")] = None
    format: Annotated[OutputSchema | None, doc("What the text must match.")] = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    model: Annotated[str, doc("Any name: there is one model. It is told back.", example="tgi")]
    messages: Annotated[
        list[AnthropicTurn],
        doc("The conversation so far.", example=[{"role": "user", "content": "What is Deep Learning?"}]),
    ]
    system: Annotated[str | list[dict[str, Any]] | None, doc("The system prompt, as text or as text blocks.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        doc("`{name, description, input_schema}`. Those with a schema of Anthropic's own are left out."),
    ] = None
    tool_choice: Annotated[AnthropicToolChoice | None, doc("Whether and what the model must call.")] = None
    thinking: Annotated[ThinkingConfig | None, doc("Whether the model thinks. Left out: as its template says.")] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputSchema | None, doc("The older name of `output_config.format`.")] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[U32, doc("At most this many tokens.", example=64, minimum=1)]
    stop_sequences: Annotated[list[str] | None, doc("Texts that end the generation.")] = None
    stream: Annotated[bool | None, doc("Send the answer in parts as they come.")] = None
    temperature: Annotated[float | None, doc("0: always the most likely token.", minimum=0, maximum=2)] = None
    top_p: Annotated[
        float | None,
        doc("Choose among the most likely tokens that together reach this probability.", **ABOVE_0, maximum=1),
    ] = None
    top_k: Annotated[int | None, doc("Choose among this many of the most likely tokens.", minimum=0)] = None
    # No effect on the answer here:
    metadata: Any = None
    service_tier: Any = None


class ImageSource(msgspec.Struct, kw_only=True):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""


# -- answers -------------------------------------------------------------------------------------------------------


class MessagesUsage(msgspec.Struct):
    input_tokens: Annotated[int, doc("Tokens of the prompt that were not cached.")]
    cache_creation_input_tokens: int
    cache_read_input_tokens: Annotated[int, doc("Tokens of the prompt that were cached.")]
    output_tokens: int


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessagesAnswer(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: Annotated[StopReason | None, doc("Why the generation ended.")]
    stop_sequence: Annotated[str | None, doc("Which of `stop_sequences` ended it.")]
    usage: MessagesUsage


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class StopDelta(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessagesError(msgspec.Struct):
    type: str
    message: str


class MessagesEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; which members it has depends on its type."""

    type: str
    message: MessagesAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class MessagesEnd(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessagesErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    error: MessagesError
    request_id: str


class TokenCount(msgspec.Struct):
    input_tokens: int


class AnthropicModel(msgspec.Struct, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: str


class AnthropicModels(msgspec.Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str
