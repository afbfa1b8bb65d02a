"""The bodies of OpenAI's Responses API.

What an item of `input` or a tool holds depends on its type, and new types come every few weeks: they are plain objects
here, and `responses_request` reads those it knows. A field nobody knows is ignored.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from text_generation_inference.api.bodies import U32
from text_generation_inference.api.field_docs import ABOVE_0, doc, refused
from text_generation_inference.api.openai_bodies import ChatCompletionLogprob

# -- requests ------------------------------------------------------------------------------------------------------


class TextSettings(msgspec.Struct, kw_only=True):
    format: Annotated[
        dict[str, Any] | None, doc("`{type}`: `text`, `json_object`, or `json_schema` with `name` and `schema`.")
    ] = None
    verbosity: str | None = None  # no effect


class ReasoningSettings(msgspec.Struct, kw_only=True):
    effort: Annotated[
        str | None, doc("A variable of the chat template, `reasoning_effort`. `none` turns thinking off.")
    ] = None
    summary: Annotated[str | None, doc("Given: what the model thinks is told as a summary, in full.")] = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    input: Annotated[
        str | list[dict[str, Any]],
        doc(
            "A text, or items by `type`: `message`, `function_call`, `function_call_output`, `reasoning`.",
            example="What is Deep Learning?",
        ),
    ]
    model: Annotated[str | None, doc("Any name: there is one model. It is told back.")] = None
    instructions: Annotated[str | None, doc("The system prompt. Of this request alone.")] = None
    max_output_tokens: Annotated[U32 | None, doc("At most this many tokens.", example=64, minimum=1)] = None
    temperature: Annotated[float | None, doc("0: always the most likely token.", minimum=0, maximum=2)] = None
    top_p: Annotated[
        float | None,
        doc("Choose among the most likely tokens that together reach this probability.", **ABOVE_0, maximum=1),
    ] = None
    top_logprobs: Annotated[U32 | None, doc("How many of the best tokens `include` tells of.", maximum=20)] = None
    stream: Annotated[bool | None, doc("Send the answer in parts as they come.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        doc("`{type: function, name, description, parameters}`. Those of other types are left out."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        doc("Whether and what the model must call: `auto`, `none`, `required`, or a function."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, doc("Whether an answer may call more than one function.")] = None
    text: Annotated[TextSettings | None, doc("What the answer must match.")] = None
    reasoning: ReasoningSettings | None = None
    include: Annotated[
        list[str] | None, doc("`message.output_text.logprobs`, `reasoning.encrypted_content`; others have no effect.")
    ] = None
    store: Annotated[bool | None, doc("False: the answer cannot be continued by its id.")] = None
    previous_response_id: Annotated[str | None, doc("A response that is stored, which this one continues.")] = None
    metadata: Annotated[dict[str, Any] | None, doc("Told back.")] = None
    background: Annotated[bool | None, refused] = None
    conversation: Annotated[Any, refused] = None
    prompt: Annotated[Any, refused] = None
    # No effect on the answer here:
    truncation: str | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    stream_options: Any = None


# -- answers -------------------------------------------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # newer clients ask for it


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputTextPart(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatCompletionLogprob] = []


class ReasoningTextPart(msgspec.Struct, tag="reasoning_text"):
    text: str


class SummaryTextPart(msgspec.Struct, tag="summary_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ReasoningItem(msgspec.Struct, tag="reasoning", kw_only=True):
    id: str
    summary: list[SummaryTextPart] = []
    content: list[ReasoningTextPart] | UnsetType = UNSET
    encrypted_content: Annotated[str | UnsetType, doc("The same, for clients that send nothing else back.")] = UNSET
    status: ItemStatus


class MessageItem(msgspec.Struct, tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: str = "assistant"
    content: list[OutputTextPart] = []


class FunctionCallItem(msgspec.Struct, tag="function_call", kw_only=True):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class ResponsesAnswer(msgspec.Struct, tag_field="object", tag="response", kw_only=True):
    id: str
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningSettings
    store: Annotated[bool, doc("Whether it can be continued by its id.")]
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    metadata: dict[str, Any]


class ResponsesEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; which further members it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponsesAnswer | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    delta: str | UnsetType = UNSET


class InputTokenCount(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class DeletedResponse(msgspec.Struct, tag_field="object", tag="response"):
    id: str
    deleted: bool
