"""From a body of Anthropic's Messages API to one of the chat route.

What Claude Code does to the prefix cache is undone here: the first block of its system prompt differs in every request
and means nothing to a model, and its words of the system between turns stay where they are (`chat_turns`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from text_generation_inference.api.chat_turns import as_content, checked, join_neighbours, place_system
from text_generation_inference.api.errors import UnsupportedError
from text_generation_inference.api.loose_items import Note, read_item, type_of
from text_generation_inference.api.messages_bodies import (
    AnthropicToolChoice,
    AnthropicTurn,
    CountTokensRequest,
    ImageSource,
    MessagesRequest,
    OutputSchema,
    ThinkingConfig,
)
from text_generation_inference.api.openai_bodies import (
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    ImagePart,
    JsonSchemaConfig,
    Message,
    NamedToolChoice,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.picture_prompt import PictureWords

_BILLING = "x-anthropic-billing-header:"  # begins a system block that is no prompt


class _Text(msgspec.Struct):
    text: str


class _Image(msgspec.Struct):
    source: ImageSource


class _DocumentSource(msgspec.Struct, kw_only=True):
    type: str
    data: str = ""
    content: str | list[dict[str, Any]] = ""


class _Document(msgspec.Struct, kw_only=True):
    source: _DocumentSource
    title: str | None = None
    context: str | None = None


class _ToolUse(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct, kw_only=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None


class _Thinking(msgspec.Struct):
    thinking: str


class _SearchResult(msgspec.Struct, kw_only=True):
    content: list[dict[str, Any]]
    title: str = ""


class _CustomTool(msgspec.Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


@dataclass(slots=True)
class _Reading:
    """What is known while the turns are read."""

    words: PictureWords | None  # of a model that sees
    note: Note
    names: dict[str, str] = field(default_factory=dict[str, str])  # of functions, by the id of their call


def chat_of_messages(
    body: CountTokensRequest, takes_later_system: bool, words: PictureWords | None, note: Note
) -> ChatRequest:
    """Raises `ValidationError` that names what is wrong. `words`: of a model that sees."""
    if not body.messages:
        raise ValidationError("`messages` cannot be empty")
    reading = _Reading(words, note)
    system = _system(body.system, reading)
    turns = [Message(role="system", content=system)] if system else []
    for number, turn in enumerate(body.messages):
        turns += _turns_of(turn, f"messages[{number}]", reading)
    choice, parallel = _choice(body.tool_choice)
    chat = ChatRequest(
        model=body.model,
        messages=join_neighbours(place_system(turns, takes_later_system)),
        tools=_tools(body.tools or [], note) or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        separate_reasoning=True,
    )
    _set_thinking(chat, body.thinking)
    given = body.output_config
    if given is not None and given.effort is not None:
        chat.reasoning_effort = given.effort
    chat.response_format = _format(given.format if given is not None and given.format else body.output_format)
    if isinstance(body, MessagesRequest):
        chat.max_tokens, chat.stream = body.max_tokens, body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.stop = body.stop_sequences
    return chat


# -- turns ---------------------------------------------------------------------------------------------------------


def _system(given: str | list[dict[str, Any]] | None, reading: _Reading) -> str:
    if given is None or isinstance(given, str):
        return checked(given or "", "system", reading.words)
    texts: list[str] = []
    for number, block in enumerate(given):
        place = f"system[{number}]"
        if type_of(block, place, "text") != "text":
            reading.note("system.type")
            continue
        text = read_item(block, _Text, place).text
        if not text.startswith(_BILLING):
            texts.append(checked(text, place, reading.words))
    return "\n".join(texts)


def _turns_of(turn: AnthropicTurn, place: str, reading: _Reading) -> list[Message]:
    """Results of tools are turns of their own, before what the user says beside them."""
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=checked(turn.content, f"{place}.content", reading.words))]
    results: list[Message] = []
    parts: list[TextPart | ImagePart] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for number, block in enumerate(turn.content):
        where = f"{place}.content[{number}]"
        match type_of(block, where):
            case "tool_result":
                results.append(_result(block, where, reading))
            case "tool_use":
                call = read_item(block, _ToolUse, where)
                reading.names[call.id] = call.name
                calls.append(ToolCall(call.id, FunctionCall(name=call.name, arguments=call.input)))
            case "thinking":
                thoughts.append(read_item(block, _Thinking, where).thinking)
            case kind:
                parts += _parts_of(kind, block, where, reading)
    if results and not (parts or calls or thoughts):
        return results
    said = Message(
        role=turn.role,
        content=as_content(parts) if parts or not calls else None,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )
    return [*results, said]


def _result(block: dict[str, Any], place: str, reading: _Reading) -> Message:
    given = read_item(block, _ToolResult, place)
    content = given.content or ""
    if isinstance(content, list):
        parts: list[TextPart | ImagePart] = []
        for number, part in enumerate(content):
            where = f"{place}.content[{number}]"
            parts += _parts_of(type_of(part, where), part, where, reading)
        content = as_content(parts)
    else:
        content = checked(content, f"{place}.content", reading.words)
    name = reading.names.get(given.tool_use_id)
    return Message(role="tool", content=content, tool_call_id=given.tool_use_id, name=name)


def _parts_of(kind: str, block: dict[str, Any], place: str, reading: _Reading) -> list[TextPart | ImagePart]:
    """Text and pictures of a block. One of a type that is not known has none."""
    match kind:
        case "text":
            return [_text(read_item(block, _Text, place).text, place, reading)]
        case "image":
            return [_image(read_item(block, _Image, place).source, place, reading)]
        case "document":
            return _document(read_item(block, _Document, place), place, reading)
        case "search_result":
            found = read_item(block, _SearchResult, place)
            return [_text(f"{found.title}\n", place, reading), *_inner(found.content, f"{place}.content", reading)]
        case "image_url" | "input_image":  # of other APIs: left out, the answer would be about nothing
            raise ValidationError(f"`{place}` has the type `{kind}`: a picture has the type `image` here")
        case _:
            reading.note(f"content.{kind}")
            return []


def _inner(blocks: Sequence[dict[str, Any]], place: str, reading: _Reading) -> list[TextPart | ImagePart]:
    parts: list[TextPart | ImagePart] = []
    for number, block in enumerate(blocks):
        where = f"{place}[{number}]"
        kind = type_of(block, where)
        if kind not in ("text", "image"):
            raise ValidationError(f"`{where}.type` must be `text` or `image`")
        parts += _parts_of(kind, block, where, reading)
    return parts


def _text(text: str, place: str, reading: _Reading) -> TextPart:
    return TextPart(checked(text, place, reading.words))


def _image(source: ImageSource, place: str, reading: _Reading) -> ImagePart:
    if reading.words is None:
        raise ValidationError(f"`{place}` is a picture, and the model that is served does not see")
    if source.type == "base64":
        if not source.data:
            raise ValidationError(f"`{place}.source.data` is missing")
        return ImagePart(f"data:{source.media_type};base64,{source.data}")
    if source.type == "url":
        if not source.url:
            raise ValidationError(f"`{place}.source.url` is missing")
        return ImagePart(source.url)
    raise ValidationError(f"`{place}.source.type` must be `base64` or `url`")


def _document(given: _Document, place: str, reading: _Reading) -> list[TextPart | ImagePart]:
    heads = [f"{text}\n" for text in (given.title, given.context) if text]
    parts: list[TextPart | ImagePart] = [_text(text, place, reading) for text in heads]
    source = given.source
    if source.type == "text":
        return [*parts, _text(source.data, place, reading)]
    if source.type == "content":
        if isinstance(source.content, str):
            return [*parts, _text(source.content, place, reading)]
        return parts + _inner(source.content, f"{place}.source.content", reading)
    raise UnsupportedError(
        f"{place}.source", f"`{place}.source` must be plain text or content blocks: other documents are not supported"
    )


# -- settings ------------------------------------------------------------------------------------------------------


def _tools(given: Sequence[dict[str, Any]], note: Note) -> list[Tool]:
    """Those with a schema. What Anthropic's servers would run themselves is left out."""
    tools: list[Tool] = []
    for number, tool in enumerate(given):
        place = f"tools[{number}]"
        kind = "custom" if tool.get("type") is None else type_of(tool, place)
        if kind != "custom":
            note(f"tools.{kind}")
            continue
        custom = read_item(tool, _CustomTool, place)
        function = FunctionDefinition(name=custom.name, description=custom.description, parameters=custom.input_schema)
        tools.append(Tool(function))
    return tools


def _choice(given: AnthropicToolChoice | None) -> tuple[str | NamedToolChoice | None, bool | None]:
    """The choice in OpenAI's words, and whether several calls may come."""
    if given is None:
        return None, None
    parallel = False if given.disable_parallel_tool_use else None
    if given.type == "tool":
        assert given.name is not None
        return NamedToolChoice(function=FunctionName(given.name)), parallel
    return {"any": "required"}.get(given.type, given.type), parallel


def _set_thinking(chat: ChatRequest, given: ThinkingConfig | None) -> None:
    if given is None:
        return
    thinks = given.type != "disabled"
    chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks}  # names of one thing
    if given.type == "enabled":
        chat.thinking_token_budget = given.budget_tokens
    if not thinks or given.display == "omitted":
        chat.include_reasoning = False


def _format(given: OutputSchema | None) -> ResponseFormat | None:
    if given is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaConfig(schema=given.schema))
