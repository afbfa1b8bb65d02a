"""Turns a conversation into the prompt text a chat model was trained on.

On the way in, before tokenising: the front end renders messages and tools, then encodes the text without adding special
tokens. Equal byte for byte to `apply_chat_template(tokenize=False)` of transformers. Templates come with the model and
run in a sandbox that can change nothing. Knows nothing of HTTP: messages are plain dicts here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tgi.errors import ModelFormatError, TemplateError
from tgi.text.model_folder import read_json, read_special_tokens

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
        environment = _build_environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in named.items()}
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error
        # A token the model lacks stays undefined, which renders as nothing; None would render as "None".
        tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {role: text for role, text in tokens.items() if text is not None}
        self._sources = dict(named)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the template of a model folder. A folder without one is no error until a conversation is rendered."""
        folder = Path(folder)
        tokens = read_special_tokens(folder).texts()
        return cls(_read_source(folder), tokens.get("bos_token"), tokens.get("eos_token"), tokens)

    @property
    def found(self) -> bool:
        """Whether the model has a template."""
        return "default" in self._templates or "tool_use" in self._templates

    @property
    def source(self) -> str | None:
        """The text of the template used when there are no tools."""
        return self._sources.get("default")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. `variables` are further names the template may read.

        Raises `TemplateError` when there is no template, or when it fails or refuses the conversation.
        """
        template = self._templates.get("tool_use") if tools is not None else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError("template not found")
        context = {
            **self._tokens,
            "documents": None,
            **{name: _as_plain(value) for name, value in variables.items()},
            "messages": [_as_message(message) for message in messages],
            "tools": _as_plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(context)
        except Exception as error:  # a template is a program: any exception it raises is the template's failure
            raise TemplateError(str(error) or type(error).__name__) from error


def _read_source(folder: Path) -> str | dict[str, str] | None:
    """The templates of a folder. Separate files come before the entry in the tokenizer's settings."""
    files = {"default": folder / "chat_template.jinja"}
    files.update({path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    from_files = {name: _read_text(path) for name, path in files.items() if path.is_file()}
    if from_files:
        return from_files
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        value: object = read_json(folder, name).get("chat_template")
        if value is not None:
            return _parse_source(value, folder / name)
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} cannot be read as text: {error}. Download the model again.") from error


def _parse_source(value: object, path: Path) -> str | dict[str, str]:
    """One template, or several as a list of `{"name", "template"}` or as an object by name."""
    if isinstance(value, str):
        return value
    named: dict[object, object] = {}
    if isinstance(value, dict):
        named = cast(dict[object, object], value)
    elif isinstance(value, list):
        entries = [cast(dict[str, object], entry) for entry in cast(list[object], value) if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    templates = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
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


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's words for training: only its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own: what is set inside is not seen behind the block.
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, through which templates could reach Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        self, *pairs = args
        values: dict[str, Any] = dict(*pairs, **attributes)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _build_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType]
    names = cast(dict[str, Any], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    names["dict"] = _make_dict
    names["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML and sorts; models saw neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


def _make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)
