"""Turns a conversation into the prompt text a chat model was trained on.

On the way in, before tokenising: the front end renders messages and tools, then encodes the text without adding special
tokens. Equal byte for byte to `apply_chat_template(tokenize=False)` of transformers. Templates come with the model and
run in the sandbox of `template_sandbox`, which bounds their time and their text. Knows nothing of HTTP: messages are
plain dicts here.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import jinja2

from text_generation_inference.errors import ModelFormatError, TemplateError
from text_generation_inference.text import template_budget
from text_generation_inference.text.model_folder import read_json, read_special_tokens, read_tokenizer_config
from text_generation_inference.text.template_budget import Budget, LimitError
from text_generation_inference.text.template_sandbox import (
    ChatEnvironment,
    TemplateRefusal,
    template_line,
    undeclared_names,
)

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """The chat template of a model, which may have one for each of several uses."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Compile `source`: one template, or several by name, or None for a model without.

        `special_tokens` are further tokens that templates may use, by role (`pad_token`, `image_token`, ...). Raises
        `TemplateError` for a template that does not compile.
        """
        named = {"default": source} if isinstance(source, str) else source or {}
        environment = ChatEnvironment()
        self._templates: dict[str, jinja2.Template] = {}
        self._names: dict[str, frozenset[str]] = {}
        for name, text in named.items():
            self._templates[name], self._names[name] = _compile(environment, text)
        # A token the model lacks stays undefined, which renders as nothing; None would render as "None".
        tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {role: text for role, text in tokens.items() if text is not None}
        self._sources = dict(named)

    @classmethod
    def load(cls, folder: str | Path, tokenizer_config_path: str | Path | None = None) -> Self:
        """Read the template of a model folder. A folder without one is no error until a conversation is rendered.

        `tokenizer_config_path` is a file that takes the place of the folder's `tokenizer_config.json`: its template
        and its special tokens come before all others.
        """
        folder = Path(folder)
        config = None if tokenizer_config_path is None else read_tokenizer_config(Path(tokenizer_config_path))
        tokens = read_special_tokens(folder, config).texts()
        texts = _read_texts(folder)
        if config is not None and config.get("chat_template") is not None:
            texts = _parse_texts(config["chat_template"], Path(str(tokenizer_config_path)))
        sources = {name: text for name, (text, _) in texts.items()}
        try:
            return cls(sources, tokens.get("bos_token"), tokens.get("eos_token"), tokens)
        except TemplateError as error:
            raise ModelFormatError(f"{_first_broken(texts)}: the chat template is broken: {error}") from error

    @property
    def found(self) -> bool:
        """Whether the model has a template."""
        return "default" in self._templates or "tool_use" in self._templates

    @property
    def source(self) -> str | None:
        """The text of the template used when there are no tools."""
        return self._sources.get("default")

    @property
    def sources(self) -> Mapping[str, str]:
        """The text of every template, by name."""
        return self._sources

    @property
    def uses_tools(self) -> bool:
        """Whether a template shows the tools it is given; else the caller has to put them into a message."""
        return any("tools" in self._names.get(name, ()) for name in ("default", "tool_use"))

    @property
    def shows_tool_calls(self) -> bool:
        """Whether a template shows the calls in a message; else the caller has to make them its content."""
        return any("tool_calls" in text for text in self._sources.values())

    @cached_property
    def needs_null_content(self) -> bool:
        """Whether calls are shown only in messages whose content is None, not in those where it is empty."""
        return not self._shows_call("") and self._shows_call(None)

    def _shows_call(self, content: str | None) -> bool:
        name = "a_probe_of_calls"
        call: dict[str, Any] = {"id": "123456789", "type": "function", "function": {"name": name, "arguments": {}}}
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            return name in self.render([{"role": "user", "content": "x"}, message])
        except TemplateError:
            return False

    @cached_property
    def reads_content_parts(self) -> bool:
        """Whether a message's content may be a list of parts; else the caller has to make it one text."""
        probe = "a probe of parts"
        try:
            shown = self.render([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except TemplateError:
            return False
        return probe in shown and "'type'" not in shown and '"type"' not in shown

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_name: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. `variables` are further names the template may read.

        With `continue_final_message` the prompt ends with the content of the last message, for the model to go on with
        it, and there is no generation prompt. Without `template_name`, that of `tool_use` counts when there are tools.
        Raises `TemplateError` when there is no template, or when it fails or refuses the conversation, or takes too
        long.
        """
        name = self._choose(template_name, tools is not None)
        if not messages:
            raise TemplateError("`messages` must hold at least one message")
        try:
            plain_messages = [_as_message(message) for message in messages]
            context: dict[str, Any] = {
                **self._tokens,
                "documents": None,
                **{variable: _as_plain(value) for variable, value in variables.items()},
                "messages": plain_messages,
                "tools": _as_plain(tools),
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        except RecursionError:
            raise TemplateError("the messages, tools or template variables are nested too deeply") from None
        if not continue_final_message:
            return _render(self._templates[name], context)
        final_text = _mark_end(plain_messages[-1], self._sources[name])
        return _cut_at_mark(_render(self._templates[name], context), final_text)

    def _choose(self, template_name: str | None, has_tools: bool) -> str:
        usual = ["tool_use", "default"] if has_tools else ["default"]
        for name in usual if template_name is None else [template_name]:
            if name in self._templates:
                return name
        raise TemplateError("template not found")


def _compile(environment: ChatEnvironment, text: str) -> tuple[jinja2.Template, frozenset[str]]:
    """A template, and the names that it expects to be given."""
    budget = template_budget.current.set(Budget(0))
    try:
        return environment.from_string(text), frozenset(undeclared_names(environment, text))
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{error.message} (line {error.lineno})") from error
    except jinja2.TemplateError as error:
        raise TemplateError(str(error)) from error
    finally:
        template_budget.current.reset(budget)


def _first_broken(texts: "_Texts") -> Path:
    environment = ChatEnvironment()
    for text, path in texts.values():
        try:
            _compile(environment, text)
        except TemplateError:
            return path
    raise AssertionError("all templates compile")


def _render(template: jinja2.Template, context: dict[str, Any]) -> str:
    budget = Budget(template_budget.weigh(context))
    token = template_budget.current.set(budget)
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(context):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > budget.max_output_chars:
                raise LimitError(f"the template makes more than {budget.max_output_chars} characters of text")
    except Exception as error:  # a template is a program: any exception it raises is the template's failure
        text = str(error) or type(error).__name__
        if isinstance(error, TemplateRefusal):
            text = f"syntax error: {error} (in <string>:{template_line(error)})"
        raise TemplateError(text) from error
    finally:
        template_budget.current.reset(token)
    return "".join(pieces)


# Ends with a space, to see whether the template keeps the spaces at the end of a message.
_MARK = "HERE-THE-MESSAGE-GOES-ON "


def _mark_end(message: dict[str, Any], source: str) -> str:
    """Put a mark behind the text of a message, and return that text as it was."""
    content: object = message.get("content")
    if "content" not in source:
        raise TemplateError("the template shows no `content` of the final message, so it cannot be continued")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    for part in reversed(cast(Sequence[object], content) if isinstance(content, list | tuple) else ()):
        if isinstance(part, dict) and isinstance((text := cast(dict[str, Any], part).get("text")), str):
            cast(dict[str, Any], part)["text"] = text + _MARK
            return text
    raise TemplateError("the final message has no text in `content` to continue")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    end = rendered.rfind(_MARK.strip())
    if end < 0 or final_text.strip() not in rendered:
        raise TemplateError("the final message cannot be continued: the template does not show the whole of it")
    return rendered[:end] if rendered.startswith(_MARK, end) else rendered[:end].rstrip()


_Texts = dict[str, tuple[str, Path]]  # templates by name, each with the file that it is from


def _read_texts(folder: Path) -> _Texts:
    """The templates of a folder. Separate files come before the entry in the tokenizer's settings."""
    files = {"default": folder / "chat_template.jinja"}
    files.update({path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    from_files = {name: (_read_text(path), path) for name, path in files.items() if path.is_file()}
    if from_files:
        return from_files
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        value: object = read_json(folder, name).get("chat_template")
        if value is not None:
            return _parse_texts(value, folder / name)
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} cannot be read as text: {error}. Download the model again.") from error


def _parse_texts(value: object, path: Path) -> _Texts:
    """One template, or several as a list of `{"name", "template"}` or as an object by name."""
    if isinstance(value, str):
        return {"default": (value, path)}
    named: dict[object, object] = {}
    if isinstance(value, dict):
        named = cast(dict[object, object], value)
    elif isinstance(value, list):
        entries = [cast(dict[str, object], entry) for entry in cast(list[object], value) if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    templates = {name: (text, path) for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    if not templates or len(templates) != len(named):
        raise ModelFormatError(f"{path}: `chat_template` must be a text or a list of named ones.")
    return templates


def _as_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message the template may read, its reasoning under every name that templates use for it."""
    plain = _as_plain(message)
    if not isinstance(plain, dict):
        raise TemplateError(f"a message must be an object, found {type(message).__name__}")
    fields = cast(dict[str, Any], plain)
    reasoning = next((fields[key] for key in _REASONING_KEYS if fields.get(key) is not None), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _as_plain(value: object) -> Any:
    """A copy of JSON-like data; anything else becomes its type's name, so a template can reach no method of it."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_as_plain(key): _as_plain(item) for key, item in cast(Mapping[object, object], value).items()}
    if isinstance(value, list):
        return [_as_plain(item) for item in cast(list[object], value)]
    if isinstance(value, tuple):
        return tuple(_as_plain(item) for item in cast(tuple[object, ...], value))
    return f"<{type(value).__name__}>"
