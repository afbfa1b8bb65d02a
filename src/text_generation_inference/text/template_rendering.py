"""Renders conversations by chat templates, byte for byte as `apply_chat_template(tokenize=False)` of transformers.

Runs in a process of its own (`template_process`), because templates are programs that come with models: nothing here
bounds their time or memory, only the text that they make.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.meta
import msgspec

from text_generation_inference.errors import TemplateError
from text_generation_inference.text.template_sandbox import ChatEnvironment, TemplateRefusal

MAX_OUTPUT_CHARS = 4_000_000  # beyond twice what the caller sent
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Ends with a space, to see whether the template keeps the spaces at the end of a message.
_MARK = "HERE-THE-MESSAGE-GOES-ON "


class Templates(msgspec.Struct, frozen=True):
    """The templates of a model by name, and the special tokens that they may read by role."""

    sources: dict[str, str]
    tokens: dict[str, str]


class Conversation(msgspec.Struct, frozen=True):
    """What is rendered; `variables` are further names that the template may read.

    With `continue_final_message` the prompt ends with the content of the last message, for the model to go on with it,
    and there is no generation prompt.
    """

    template_name: str
    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = {}


class Renderer:
    """The templates of a model, compiled. `broken` says by name why one could not be."""

    def __init__(self, templates: Templates) -> None:
        environment = ChatEnvironment()
        self._sources, self._tokens = templates.sources, templates.tokens
        self._compiled: dict[str, jinja2.Template] = {}
        self.names: dict[str, list[str]] = {}  # the variables each template reads and does not set itself first
        self.broken: dict[str, str] = {}
        for name, text in templates.sources.items():
            try:
                self._compiled[name] = environment.from_string(text)
                self.names[name] = sorted(jinja2.meta.find_undeclared_variables(environment.parse(text)))
            except jinja2.TemplateSyntaxError as error:
                self.broken[name] = f"{error.message} (line {error.lineno})"
            except (jinja2.TemplateError, RecursionError) as error:
                self.broken[name] = str(error)

    def render(self, conversation: Conversation, num_input_chars: int) -> str:
        """The prompt. Raises `TemplateError` when the template fails, or refuses the conversation."""
        # Command R7B and Command A call what is thought before calls their plan.
        keys = ("thinking", "tool_plan") if "tool_plan" in self._sources[conversation.template_name] else ("thinking",)
        messages = [_as_message(message, keys) for message in conversation.messages]
        context: dict[str, Any] = {
            **self._tokens,
            "documents": None,
            **conversation.variables,
            "messages": messages,
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt and not conversation.continue_final_message,
        }
        name = conversation.template_name
        max_chars = MAX_OUTPUT_CHARS + 2 * num_input_chars
        if not conversation.continue_final_message:
            return _render(self._compiled[name], context, max_chars)
        final_text = _mark_end(messages[-1], self._sources[name])
        return _cut_at_mark(_render(self._compiled[name], context, max_chars), final_text)


def _render(template: jinja2.Template, context: dict[str, Any], max_chars: int) -> str:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(context):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                raise TemplateError(f"the template makes more than {max_chars} characters of text")
    except (TemplateError, MemoryError):
        raise
    except TemplateRefusal as error:
        raise TemplateError(f"syntax error: {error} (in <string>:{_template_line(error)})") from error
    except Exception as error:  # a template is a program: any exception it raises is the template's failure
        raise TemplateError(str(error) or type(error).__name__) from error
    return "".join(pieces)


def _template_line(error: BaseException) -> int:
    """The line of the template where `error` was raised; 0 when it was raised elsewhere."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _mark_end(message: dict[str, Any], source: str) -> str:
    """Put a mark behind the text of a message, and return that text as it was."""
    content: object = message.get("content")
    if "content" not in source:
        raise TemplateError("the template shows no `content` of the final message, so it cannot be continued")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    for part in reversed(cast(list[object], content) if isinstance(content, list) else ()):
        if isinstance(part, dict) and isinstance((text := cast(dict[str, Any], part).get("text")), str):
            cast(dict[str, Any], part)["text"] = text + _MARK
            return text
    raise TemplateError("the final message has no text in `content` to continue")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    end = rendered.rfind(_MARK.strip())
    if end < 0 or final_text.strip() not in rendered:
        raise TemplateError("the final message cannot be continued: the template does not show the whole of it")
    return rendered[:end] if rendered.startswith(_MARK, end) else rendered[:end].rstrip()


def _as_message(message: object, reasoning_keys: Sequence[str]) -> dict[str, Any]:
    """A message the template may read, its reasoning under every name that templates use for it."""
    if not isinstance(message, dict):
        raise TemplateError(f"a message must be an object, found {type(message).__name__}")
    fields = cast(dict[str, Any], message)
    reasoning = next((fields[key] for key in _REASONING_KEYS if fields.get(key) is not None), None)
    if reasoning is None:
        return fields
    return {**dict.fromkeys(reasoning_keys, reasoning), **fields, "reasoning_content": reasoning}
