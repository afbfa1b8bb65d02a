"""Messages as chat templates read them, from messages as OpenAI's and TGI's clients send them.

On the way in, before `ChatTemplate.render`. Messages are plain dicts; the caller's are never changed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from text_generation_inference.text.chat_template import ChatTemplate

TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)

# As TGI, the server tells the role in every chunk of a stream; OpenAI's Python client adds all of them up and sends the
# sum back with the message.
_REPEATED_ASSISTANT = re.compile("(assistant)+")


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate | None = None
) -> list[dict[str, Any]]:
    """Contents as text and the arguments of calls as objects.

    With `template`, in the form it reads best: text is one part where it knows parts, calls become text where it shows
    none, a developer is the system where it knows none, and a message that only calls has the empty content the
    template asks for. As in TGI all parts are one text, images too: a template may read the first part alone, and would
    leave out an image or put a mark for it that stands for nothing, because no model here sees one.
    """
    return [_normalise(message, template) for message in messages]


def append_tool_prompt(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_prompt: str | None,
    template_uses_tools: bool,
) -> list[dict[str, Any]]:
    """Put the tools, and how to call them, behind the last message, for templates that do not show tools.

    Where the template does, only a `tool_prompt` of the caller's own is added. As in TGI, a last message without
    content stays as it is, and an empty `tool_prompt` counts as none.
    """
    result = [dict(message) for message in messages]
    if (template_uses_tools and not tool_prompt) or not result:
        return result
    shown = "" if template_uses_tools else json.dumps(list(tools), ensure_ascii=False, separators=(",", ":")) + "\n"
    added = f"\n---\n{shown}{tool_prompt or TOOL_PROMPT}"
    content: object = result[-1].get("content")
    if isinstance(content, str):
        result[-1]["content"] = content + added
    elif isinstance(content, list) and content:
        result[-1]["content"] = [*cast(list[object], content), {"type": "text", "text": added}]
    return result


def _normalise(message: Mapping[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    result = dict(message)
    if _REPEATED_ASSISTANT.fullmatch(str(result.get("role"))):
        result["role"] = "assistant"
    if result.get("role") == "developer" and template is not None and not template.knows_developers:
        result["role"] = "system"
    content: object = result.get("content")
    text = content if isinstance(content, str) else ""
    if isinstance(content, list | tuple):
        text = "".join(_part_text(part) for part in cast(Sequence[Mapping[str, Any]], content))
        reads_parts = template is not None and template.reads_content_parts
        result["content"] = [{"type": "text", "text": text}] if reads_parts and content else text
    calls: object = result.get("tool_calls")
    if not calls:
        result.pop("tool_calls", None)
        if content is None:
            result["content"] = ""
        return result
    result["tool_calls"] = [_normalise_call(call) for call in cast(Sequence[Mapping[str, Any]], calls)]
    if template is not None and not template.shows_tool_calls:
        lines = [text] if text else []
        result["content"] = "\n".join([*lines, *(_call_text(call) for call in result["tool_calls"])])
    elif content is None:
        result["content"] = None if template is not None and template.needs_null_content else ""
    return result


def _part_text(part: Mapping[str, Any]) -> str:
    """As TGI: text as it is, an image as its address in Markdown."""
    if "image_url" in part:
        return f"![]({part['image_url']['url']})"
    return str(part.get("text", ""))


def _normalise_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(cast(Mapping[str, Any], call.get("function") or {}))
    arguments: object = function.pop("parameters", None)
    arguments = function.get("arguments", arguments)
    if isinstance(arguments, str):
        try:
            value: object = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
        arguments = cast(object, value) if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _call_text(call: Mapping[str, Any]) -> str:
    """The form that `TOOL_PROMPT` asks for."""
    function = call["function"]
    return json.dumps({"name": function.get("name"), "parameters": function["arguments"]}, ensure_ascii=False)
