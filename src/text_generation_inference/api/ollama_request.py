"""From a body of Ollama's API to one of `/v1/chat/completions`. Raises `ValidationError` that names Ollama's fields."""

from collections import OrderedDict, deque
from typing import Any, cast

import msgspec

from text_generation_inference.api.ollama_bodies import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaRequest,
    OllamaTurn,
)
from text_generation_inference.api.openai_bodies import (
    ChatRequest,
    FunctionCall,
    JsonSchemaConfig,
    Message,
    PlainImagePart,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)
from text_generation_inference.api.thoughts import EFFORT_VARIABLES
from text_generation_inference.errors import ValidationError

_REFUSED = ("suffix", "template", "context")  # of `/api/generate`; each would change the answer


def chat_of_ollama(body: OllamaChatRequest, sees: bool, thinks: bool) -> ChatRequest:
    """`sees`, `thinks`: whether the model does. Asking one for thoughts that has none is an error, as with Ollama."""
    messages = _messages(body.messages or [], sees)
    return _with_settings(ChatRequest(messages=messages, tools=_tools(body.tools)), body, thinks)


def chat_of_prompt(body: OllamaGenerateRequest, sees: bool, thinks: bool) -> ChatRequest:
    """A prompt as a conversation of one turn. With `raw` its messages are not used."""
    for name in _REFUSED:
        if getattr(body, name):
            raise ValidationError(f"`{name}` is not supported")
    if body.raw and (body.images or body.system):
        raise ValidationError("`raw` leaves no place for `images` and `system`")
    turns = [OllamaTurn(role="system", content=body.system)] if body.system else []
    turns.append(OllamaTurn(role="user", content=body.prompt, images=body.images))
    return _with_settings(ChatRequest(messages=_messages(turns, sees)), body, thinks)


def _with_settings(chat: ChatRequest, body: OllamaRequest, thinks: bool) -> ChatRequest:
    given = body.options or OllamaOptions()
    chat.model, chat.stream = body.model, body.stream is not False
    if given.num_predict is not None and given.num_predict > 0:  # others mean as many as there is room for
        chat.max_tokens = given.num_predict
    chat.temperature, chat.top_p, chat.min_p = given.temperature, given.top_p, given.min_p
    chat.top_k, chat.typical_p, chat.repetition_penalty = given.top_k, given.typical_p, given.repeat_penalty
    chat.presence_penalty, chat.frequency_penalty = given.presence_penalty, given.frequency_penalty
    chat.seed = given.seed if given.seed is not None and given.seed >= 0 else None
    chat.stop = given.stop
    chat.response_format = _format(body.format)
    chat.separate_reasoning = True
    if body.think not in (None, False) and not thinks:
        raise ValidationError(f'`think`: "{body.model}" does not support thinking')
    if isinstance(body.think, str):
        chat.reasoning_effort = body.think
    elif body.think is not None:
        chat.chat_template_kwargs = dict.fromkeys(EFFORT_VARIABLES, body.think)
    if body.think is False:
        chat.include_reasoning = False
    return chat


def _format(given: Any) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if given == "json":
        return ResponseFormat(type="json_object")
    if not isinstance(given, dict):
        raise ValidationError('`format` must be "json" or a JSON schema')
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaConfig(schema=cast(object, given)))


def _tools(given: list[Any] | None) -> list[Tool] | None:
    try:
        return msgspec.convert(given, list[Tool] | None)
    except msgspec.ValidationError as error:
        raise ValidationError(f"`tools`: {error}") from None


class _OpenCalls:
    """Calls without a result, in their order. A conversation may have thousands: nothing here looks at all of them."""

    def __init__(self) -> None:
        self._places: OrderedDict[int, tuple[str, str]] = OrderedDict()  # name and id
        self._by_name: dict[str, deque[int]] = {}
        self._num_added = 0

    def add(self, name: str, number: str) -> None:
        self._places[self._num_added] = (name, number)
        self._by_name.setdefault(name, deque()).append(self._num_added)
        self._num_added += 1

    def take(self, name: str | None) -> str | None:
        """The id of the oldest one with that name, else of the oldest."""
        if not self._places:
            return None
        if name is None or not self._by_name.get(name):
            name = next(iter(self._places.values()))[0]
        return self._places.pop(self._by_name[name].popleft())[1]


def _messages(turns: list[OllamaTurn], sees: bool) -> list[Message]:
    """Calls have no ids in this API: results belong to them by the name of the function, else in their order."""
    messages: list[Message] = []
    open_calls = _OpenCalls()
    num_calls = 0
    for index, turn in enumerate(turns):
        message = Message(role=turn.role, content=turn.content or "", reasoning_content=turn.thinking or None)
        if turn.images:
            if not sees:
                raise ValidationError(f"`messages[{index}].images`: this model does not see")
            pictures = [PlainImagePart(base64=image).as_url() for image in turn.images]
            message.content = [*pictures, *([TextPart(turn.content)] if turn.content else [])]
        if turn.tool_calls:
            message.tool_calls = []
            for call in turn.tool_calls:
                number = call.id if isinstance(call.id, str) and call.id else f"call{num_calls:05d}"
                num_calls += 1
                function = FunctionCall(name=call.function.name, arguments=call.function.arguments)
                message.tool_calls.append(ToolCall(number, function))
                open_calls.add(call.function.name, number)
            message.content = turn.content or None
        elif turn.role == "tool":
            message.name, message.tool_call_id = turn.tool_name, turn.tool_call_id or open_calls.take(turn.tool_name)
        messages.append(message)
    return messages
