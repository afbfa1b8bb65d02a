"""From a body of OpenAI's Responses API to one of the chat route.

Items that are parts of one turn (thoughts, a message, calls) become one message, as templates want it.
"""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from text_generation_inference.api.chat_turns import as_content, checked, join_neighbours, place_system
from text_generation_inference.api.errors import UnsupportedError
from text_generation_inference.api.loose_items import Note, read_item, type_of
from text_generation_inference.api.openai_bodies import (
    AllowedTools,
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
from text_generation_inference.api.responses_bodies import ResponsesRequest
from text_generation_inference.errors import ValidationError
from text_generation_inference.text.picture_prompt import PictureWords

Items = Sequence[dict[str, Any]]
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_NOT_SERVED = ("background", "conversation", "prompt")


class _Said(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _WithText(msgspec.Struct):
    text: str


class _WithRefusal(msgspec.Struct):
    refusal: str


class _InputImage(msgspec.Struct, kw_only=True):
    image_url: str | None = None


class _Called(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str | dict[str, Any] = ""
    input: str = ""  # of a tool that takes a text


class _CallOutput(msgspec.Struct, kw_only=True):
    call_id: str
    output: str | list[dict[str, Any]]


class _Reasoned(msgspec.Struct, kw_only=True):
    summary: list[_WithText] | None = None
    content: list[_WithText] | None = None
    encrypted_content: str | None = None


class _Reference(msgspec.Struct):
    id: str


class _FunctionTool(msgspec.Struct, kw_only=True):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class _Format(msgspec.Struct, kw_only=True):
    schema: Any
    name: str | None = None
    strict: bool | None = None


class _Allowed(msgspec.Struct, kw_only=True):
    mode: str = "auto"
    tools: list[dict[str, Any]]


def items_of(body: ResponsesRequest, find: Callable[[str], bytes], max_bytes: int) -> list[dict[str, Any]]:
    """What the caller gives, with what it refers to in its place: `find` knows items by their id.

    A reference is short and an item may be long, so all that are referred to have `max_bytes` together.
    """
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    items: list[dict[str, Any]] = []
    for number, item in enumerate(body.input):
        if item.get("type") == "item_reference" or set(item) == {"id"}:
            found = find(read_item(item, _Reference, f"input[{number}]").id)
            max_bytes -= len(found)
            if max_bytes < 0:
                raise ValidationError("`input` refers to more than a request may hold")
            item = msgspec.json.decode(found, type=dict[str, Any])
        items.append(item)
    return items


def chat_of_response(
    body: ResponsesRequest,
    before: Items,
    items: Items,
    takes_later_system: bool,
    words: PictureWords | None,
    note: Note,
) -> ChatRequest:
    """`before`: the conversation that this one continues. `words`: of a model that sees. Raises `ValidationError`."""
    for name in _NOT_SERVED:
        if getattr(body, name) not in (None, False):
            raise UnsupportedError(name, f"`{name}` is not supported")
    turns: list[Message] = []
    if isinstance(body.input, str):
        checked(body.input, "input", words)
    if body.instructions:
        turns.append(Message(role="system", content=checked(body.instructions, "instructions", words)))
    names: dict[str, str] = {}  # of functions, by the id of their call
    for item in before:
        turns += _turn_of(item, "previous_response_id", names, words, note)
    for number, item in enumerate(items):
        turns += _turn_of(item, f"input[{number}]", names, words, note)
    if not any(turn.role not in ("system", "developer") for turn in turns):
        raise ValidationError("`input` cannot be empty")
    given = body.reasoning
    include = body.include or []
    try:
        return ChatRequest(
            model=body.model,
            messages=join_neighbours(place_system(turns, takes_later_system)),
            tools=_tools(body.tools or [], note) or None,
            tool_choice=_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            response_format=_format(None if body.text is None else body.text.format),
            reasoning_effort=None if given is None else given.effort,
            separate_reasoning=True,
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=LOGPROBS in include,
            top_logprobs=body.top_logprobs,
            stream=body.stream,
            # An answer is one that has been told: what comes next is the model's turn, whoever spoke last.
            add_generation_prompt=True,
        )
    except ValueError as error:  # of tools that are allowed and not there
        raise ValidationError(str(error)) from None


# -- turns ---------------------------------------------------------------------------------------------------------


def _turn_of(
    item: dict[str, Any], place: str, names: dict[str, str], words: PictureWords | None, note: Note
) -> list[Message]:
    match type_of(item, place, "message"):
        case "message":
            said = read_item(item, _Said, place)
            if said.role not in _ROLES:
                raise ValidationError(f"`{place}.role` must be one of {', '.join(_ROLES)}")
            return [Message(role=said.role, content=_content(said.content, f"{place}.content", words, note))]
        case "function_call" | "custom_tool_call" as kind:
            called = read_item(item, _Called, place)
            names[called.call_id] = called.name
            arguments: Any = called.arguments if kind == "function_call" else {"input": called.input}
            call = ToolCall(called.call_id, FunctionCall(name=called.name, arguments=arguments or {}))
            return [Message(role="assistant", tool_calls=[call])]
        case "function_call_output" | "custom_tool_call_output":
            output = read_item(item, _CallOutput, place)
            content = _content(output.output, f"{place}.output", words, note)
            name = names.get(output.call_id)
            return [Message(role="tool", content=content, tool_call_id=output.call_id, name=name)]
        case "reasoning":
            thoughts = _thoughts(read_item(item, _Reasoned, place))
            return [Message(role="assistant", reasoning_content=thoughts)] if thoughts else []
        case kind:
            note(f"input.{kind}")
            return []


def _content(given: str | list[dict[str, Any]], place: str, words: PictureWords | None, note: Note) -> Any:
    if isinstance(given, str):
        return checked(given, place, words)
    parts: list[TextPart | ImagePart] = []
    for number, part in enumerate(given):
        where = f"{place}[{number}]"
        match type_of(part, where):
            case kind if kind in _TEXTS:
                parts.append(TextPart(checked(read_item(part, _WithText, where).text, where, words)))
            case "refusal":
                parts.append(TextPart(checked(read_item(part, _WithRefusal, where).refusal, where, words)))
            case "input_image":
                url = read_item(part, _InputImage, where).image_url
                if url is None:
                    raise UnsupportedError(f"{where}.file_id", f"`{where}` needs an `image_url`: there are no files")
                if words is None:
                    raise ValidationError(f"`{where}` is a picture, and the model that is served does not see")
                parts.append(ImagePart(url))
            case "input_file" | "input_audio" as kind:
                raise UnsupportedError(where, f"`{where}` has the type `{kind}`, which is not supported")
            case "image" | "image_url" as kind:  # of other APIs: left out, the answer would be about nothing
                raise UnsupportedError(
                    where, f"`{where}` has the type `{kind}`: a picture has the type `input_image` here"
                )
            case kind:
                note(f"content.{kind}")
    return as_content(parts)


def _thoughts(given: _Reasoned) -> str:
    told = given.content or given.summary or []
    if told or not given.encrypted_content:
        return "\n".join(part.text for part in told)
    try:
        return base64.b64decode(given.encrypted_content, validate=True).decode()
    except (binascii.Error, ValueError):  # another server's
        return ""


def hidden_thoughts(text: str) -> str:
    """The thoughts for clients that send back nothing else."""
    return base64.b64encode(text.encode(errors="replace")).decode()


# -- settings ------------------------------------------------------------------------------------------------------


def _tools(given: Items, note: Note) -> list[Tool]:
    """Functions. What OpenAI's servers would run themselves is left out."""
    tools: list[Tool] = []
    for number, tool in enumerate(given):
        place = f"tools[{number}]"
        if (kind := type_of(tool, place)) != "function":
            note(f"tools.{kind}")
            continue
        function = read_item(tool, _FunctionTool, place)
        parameters: Any = UNSET if function.parameters is None else function.parameters
        tools.append(
            Tool(FunctionDefinition(name=function.name, description=function.description, parameters=parameters))
        )
    return tools


def _choice(given: str | dict[str, Any] | None) -> str | NamedToolChoice | None:
    if given is None or given in ("auto", "none", "required"):
        return given
    if isinstance(given, str):
        raise ValidationError(f"`tool_choice` must be auto, none, required or an object. Given: {given[:64]!r}")
    kind = type_of(given, "tool_choice")
    if kind == "function":
        return NamedToolChoice(function=read_item(given, FunctionName, "tool_choice"))
    if kind != "allowed_tools":
        raise UnsupportedError("tool_choice", "`tool_choice` must be a function: the server runs no tools of its own")
    allowed = read_item(given, _Allowed, "tool_choice")
    functions = [tool for tool in allowed.tools if tool.get("type") == "function"]
    mode = read_item({"mode": allowed.mode, "tools": functions}, AllowedTools, "tool_choice")
    return NamedToolChoice(type="allowed_tools", allowed_tools=mode)


def _format(given: dict[str, Any] | None) -> ResponseFormat | None:
    if given is None:
        return None
    match type_of(given, "text.format"):
        case "text":
            return None
        case "json_object":
            return ResponseFormat(type="json_object")
        case "json_schema":
            schema = read_item(given, _Format, "text.format").schema
            return ResponseFormat(type="json_schema", json_schema=JsonSchemaConfig(schema=schema))
        case _:
            raise ValidationError("`text.format.type` must be text, json_object or json_schema")
