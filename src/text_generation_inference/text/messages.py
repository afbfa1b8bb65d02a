"""Messages as chat templates read them, from messages as OpenAI's and TGI's clients send them.

On the way in, before `ChatTemplate.render`. Messages are plain dicts; the caller's are never changed.
"""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from text_generation_inference.errors import ValidationError
from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.types import VideoSource

TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that "
    "best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument "
    "name and its value}.Do not use variables.\n"
)

_PICTURE_KEYS = ("image", "url", "path", "base64", "image_url")
_PICTURES, _VIDEOS = ("image", "image_url"), ("video", "video_url")
_VIDEO_KEYS = ("video", "video_url", "url", "path")
# As TGI, the server tells the role in every chunk of a stream; OpenAI's Python client adds all of them up and sends the
# sum back with the message.
_REPEATED_ASSISTANT = re.compile("(assistant)+")


Show = Callable[[Any], str | None]


def _as_markdown(source: Any) -> str:
    if not isinstance(source, str):  # with no address: what it holds is no text
        what = "a video" if isinstance(source, VideoSource) else "a picture"
        raise ValidationError(f"`messages` holds {what}, and this model takes none")
    return f"![]({source})"


def normalise_messages(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate | None = None,
    show: Show = _as_markdown,
    check: Callable[[int, object], object] | None = None,
) -> list[dict[str, Any]]:
    """Contents as text and the arguments of calls as objects.

    With `template`, in the form it reads best: text is one part where it reads parts alone, calls become text where it
    shows none, their arguments are text where it joins that to other text, each has a message where one may hold no
    more, a developer is the system where it knows none, and a message that only calls has the empty content the
    template asks for. As in TGI all parts are one text: a template may read the first part alone, or no list.

    `show` is called for each picture, in the order of the result, with where it is, and gives the text that stands for
    it; None leaves a part `{"type": "image"}` to the template. Without it a picture is its address in Markdown, as in
    TGI: for a model that does not see, a template's mark would stand for nothing. `check` is called for each content
    of the result, with the place among `messages` that it comes from.
    """
    arranged: Iterable[tuple[int, Mapping[str, Any]]] = enumerate(messages)
    several = template is not None and any(len(_calls_of(message)) > 1 for message in messages)
    if several and template is not None and template.needs_single_calls:
        arranged = _one_call_each(messages)
    normal: list[dict[str, Any]] = []
    for place, message in arranged:
        normal.append(_normalise(message, template, show))
        if check is not None:
            check(place, normal[-1]["content"])
    return normal


def text_of(content: object) -> str:
    """What a content says, whichever form it has."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(str(part.get("text", "")) for part in cast(list[dict[str, Any]], content))


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


def _normalise(message: Mapping[str, Any], template: ChatTemplate | None, show: Show) -> dict[str, Any]:
    result = _with_text(message, template, show)
    content: object = result.get("content")
    if template is not None and isinstance(content, str):
        forms = template.content_forms(str(result.get("role")))
        if forms.parts and not forms.text:
            result["content"] = [{"type": "text", "text": content}]
    return result


def _with_text(message: Mapping[str, Any], template: ChatTemplate | None, show: Show) -> dict[str, Any]:
    """Contents as one text, or as parts where pictures are among them."""
    _check(message, Mapping, "a message", "an object")
    result = dict(message)
    if _REPEATED_ASSISTANT.fullmatch(str(result.get("role"))):
        result["role"] = "assistant"
    if result.get("role") == "developer" and template is not None and not template.knows_developers:
        result["role"] = "system"
    content: object = result.get("content")
    if content is not None:
        _check(content, (str, list, tuple), "`content`", "a text or a list of parts")
    text = content if isinstance(content, str) else ""
    if isinstance(content, list | tuple):
        parts = _join_parts(cast(Sequence[Mapping[str, Any]], content), show)
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        result["content"] = parts if any(part["type"] == "image" for part in parts) else text
    calls: object = result.get("tool_calls")
    if not calls:
        result.pop("tool_calls", None)
        if content is None:
            result["content"] = ""
        return result
    as_text = template is not None and template.needs_argument_text
    result["tool_calls"] = [_normalise_call(call, as_text) for call in cast(Sequence[Mapping[str, Any]], calls)]
    if template is not None and not template.shows_tool_calls:
        lines = [text] if text else []
        result["content"] = "\n".join([*lines, *(_call_text(call) for call in result["tool_calls"])])
    elif not result.get("content"):
        result["content"] = None if template is not None and template.needs_null_content else ""
    return result


def _field(message: object, name: str) -> object:
    """Nothing of what is no message, which is refused in its turn."""
    return cast(Mapping[str, object], message).get(name) if isinstance(message, Mapping) else None


def _calls_of(message: object) -> Sequence[object]:
    calls = _field(message, "tool_calls")
    return cast(Sequence[object], calls) if isinstance(calls, list | tuple) else ()


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Messages of several calls as one for each, with what came of a call behind it; and their places before.

    Of calls with the same id, or with none, each has one result, in order.
    """
    end = 0
    for place, message in enumerate(messages):
        if place < end:  # a result, which stands behind its call
            continue
        calls, end = _calls_of(message), place + 1
        if len(calls) < 2:
            yield place, message
            continue
        ids = [str(_field(call, "id")) for call in calls]
        results: dict[str, deque[tuple[int, Mapping[str, Any]]]] = {name: deque() for name in ids}
        others: deque[tuple[int, Mapping[str, Any]]] = deque()
        while end < len(messages) and _field(messages[end], "role") == "tool":
            results.get(str(_field(messages[end], "tool_call_id")), others).append((end, messages[end]))
            end += 1
        left = Counter(ids)
        for number, (name, call) in enumerate(zip(ids, calls, strict=True)):
            yield place, {**(message if number == 0 else {"role": message.get("role")}), "tool_calls": [call]}
            left[name] -= 1
            of_call = results[name]
            for _ in range(min(1, len(of_call)) if left[name] else len(of_call)):
                yield of_call.popleft()
        yield from others


def _join_parts(content: Iterable[Mapping[str, Any]], show: Show) -> list[dict[str, str]]:
    """Pictures that are left to the template, and all text between two of them as one part."""
    parts: list[dict[str, str]] = []
    for part in content:
        _check(part, Mapping, "a part of `content`", "an object")
        source = picture_of(part)
        text = str(part.get("text") or "") if source is None else show(source)
        if text is None:
            parts.append({"type": "image"})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        else:
            parts.append({"type": "text", "text": text})
    return parts


def picture_of(part: Mapping[str, Any]) -> Any:
    """Where a part's picture or video is, or what it is, if the part is one: in OpenAI's words or in transformers'."""
    kind = part.get("type", next((name for name in ("text", "image_url") if name in part), "image"))
    if kind in _VIDEOS:
        return _video_of(part)
    if kind not in _PICTURES:
        if kind != "text":  # nothing of it would be shown
            known = ", ".join(("text", *_PICTURES, *_VIDEOS))
            raise ValidationError(f"`messages` holds a part of type {kind!r}; known: {known}")
        return None
    names = _PICTURE_KEYS if kind == "image" else _PICTURE_KEYS[-1:]
    name = next((name for name in names if part.get(name) is not None), None)
    if name is None:
        raise ValidationError("`messages` holds an image that is not there: `image` or `image_url` is missing")
    source: object = part[name]
    if name == "base64":
        return f"data:;base64,{source}"
    return cast(Mapping[str, Any], source).get("url", "") if isinstance(source, Mapping) else source


def _check(value: object, kinds: type | tuple[type, ...], what: str, meant: str) -> None:
    if not isinstance(value, kinds):
        raise ValidationError(f"`messages`: {what} must be {meant}. Given: {type(value).__name__}")


def _video_of(part: Mapping[str, Any]) -> VideoSource:
    """A list of frames, or one file, in vLLM's words (`video_url`) or in transformers'."""
    source: object = next((part[name] for name in _VIDEO_KEYS if part.get(name) is not None), None)
    if isinstance(source, Mapping):
        source = cast(Mapping[str, Any], source).get("url", "")
    if source is None:
        raise ValidationError("`messages` holds a video without `video` or `video_url`")
    if isinstance(source, list | tuple):
        return VideoSource(list(cast(Sequence[Any], source)), fps=part.get("fps"))
    return VideoSource([source], is_animation=True, fps=part.get("fps"))


def _normalise_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = dict(cast(Mapping[str, Any], call.get("function") or {}))
    arguments: object = function.pop("parameters", None)
    arguments = function.get("arguments", arguments)
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and not as_text:
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
