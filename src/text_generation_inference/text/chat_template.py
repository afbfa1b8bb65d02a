"""Turns a conversation into the prompt text a chat model was trained on.

On the way in, before tokenising: the front end renders messages and tools, then encodes the text without adding special
tokens. Templates come with the model, so they run in a process with limits (`template_process`). Knows nothing of HTTP:
messages are plain dicts here.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from text_generation_inference.errors import ModelFormatError, TemplateError
from text_generation_inference.text.model_folder import read_special_tokens, read_tokenizer_config
from text_generation_inference.text.template_files import parse_templates, read_templates
from text_generation_inference.text.template_process import Rendering, TemplateProcess, encode_job, shared_process
from text_generation_inference.text.template_rendering import Conversation, Templates

# Whose messages are read as whose; all others as a user's.
_FORMS_OF = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


class BrokenTemplate(TemplateError):
    """The template `name` does not compile."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class ContentForms(NamedTuple):
    """The forms in which a template shows what a message says."""

    text: bool
    parts: bool  # `[{"type": "text", "text": ...}]`


class ChatTemplate:
    """The chat template of a model, which may have one for each of several uses."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        """Compile `source`: one template, or several by name, or None for a model without.

        `special_tokens` are further tokens that templates may use, by role (`pad_token`, `image_token`, ...). Raises
        `BrokenTemplate` for one that does not compile.
        """
        self._sources = {"default": source} if isinstance(source, str) else dict(source or {})
        # A token the model lacks stays undefined, which renders as nothing; None would render as "None".
        tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        given = {role: text for role, text in tokens.items() if text is not None}
        self._templates = msgspec.Raw(msgspec.json.encode(Templates(self._sources, given)))
        self._names: Mapping[str, list[str]] = {}
        self._content_forms: dict[str, ContentForms] = {}  # what was found out, by role
        self._picture_markers: dict[str, bool] = {}
        self.process = process or shared_process()
        if self._sources:
            compiled = self.process.exchange(encode_job(self._templates, None))
            for name, text in compiled.broken.items():
                raise BrokenTemplate(name, text)
            self._names = compiled.names

    @classmethod
    def load(cls, folder: str | Path, tokenizer_config_path: str | Path | None = None) -> Self:
        """Read the template of a model folder. A folder without one is no error until a conversation is rendered.

        `tokenizer_config_path` is a file that takes the place of the folder's `tokenizer_config.json`: its template
        and its special tokens come before all others.
        """
        folder = Path(folder)
        config = None if tokenizer_config_path is None else read_tokenizer_config(Path(tokenizer_config_path))
        tokens = read_special_tokens(folder, config).texts()
        texts = read_templates(folder)
        if config is not None and config.get("chat_template") is not None:
            texts = parse_templates(config["chat_template"], Path(str(tokenizer_config_path)))
        sources = {name: text for name, (text, _) in texts.items()}
        try:
            return cls(sources, tokens.get("bos_token"), tokens.get("eos_token"), tokens)
        except BrokenTemplate as error:
            raise ModelFormatError(f"{texts[error.name][1]}: the chat template is broken: {error}") from error
        except TemplateError as error:  # it does not even compile within the limits
            raise ModelFormatError(f"{folder}: the chat template is broken: {error}") from error

    @property
    def found(self) -> bool:
        """Whether the model has a template."""
        return "default" in self._sources or "tool_use" in self._sources

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

    @property
    def knows_developers(self) -> bool:
        """Whether a template has words for messages of a developer; else they are the system's."""
        return any("developer" in text for text in self._sources.values())

    @property
    def needs_null_content(self) -> bool:
        """Whether calls are shown only in messages whose content is None, not in those where it is empty."""
        return self._call_needs[0]

    @property
    def needs_argument_text(self) -> bool:
        """Whether calls are shown only where their arguments are text, as DeepSeek has it."""
        return self._call_needs[1]

    @cached_property
    def _call_needs(self) -> tuple[bool, bool]:
        """The first way in which a call is shown: whether with a content that is None, and with arguments as text."""
        ways = ((False, False), (True, False), (False, True), (True, True))
        return next((way for way in ways if self._shows_calls([1], *way)), ways[0])

    @cached_property
    def needs_single_calls(self) -> bool:
        """Whether a message may hold one call and no more: Llama 3's templates refuse others, GPT-OSS's shows one."""
        return not self._shows_calls([2], *self._call_needs) and self._shows_calls([1, 1], *self._call_needs)

    def _shows_calls(self, counts: Sequence[int], null_content: bool, argument_text: bool) -> bool:
        """Whether messages with so many calls each are shown with all of them."""
        messages: list[dict[str, Any]] = [self._say("user", "x")]
        content = None if null_content else self._say("assistant", "")["content"]
        names: list[str] = []
        for count in counts:
            calls: list[dict[str, Any]] = []
            for _ in range(count):
                names.append(f"a_probe_of_calls_{len(names)}")
                function: dict[str, Any] = {"name": names[-1], "arguments": "{}" if argument_text else {}}
                calls.append({"id": "123456789", "type": "function", "function": function})
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        try:
            shown = self.render(messages)
        except TemplateError:
            return False
        return all(name in shown for name in names)

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether words of the system between other turns are shown, and in their place."""
        asked, told = "a probe of users", "a probe of the system"
        turns = [("system", "x"), ("user", asked), ("system", told), ("assistant", "y"), ("user", "z")]
        try:
            shown = self.render([self._say(role, text) for role, text in turns])
        except TemplateError:
            return False
        return shown.count(told) == 1 and shown.find(told) > shown.find(asked) >= 0

    def content_forms(self, role: str) -> ContentForms:
        """What the content of a message may be, by the role it has: the caller has to put others into such a form.

        Templates of models that see often read parts alone, and show nothing of a text; some read parts of users and
        texts of the system.
        """
        role = _FORMS_OF.get(role, "user")
        if role not in self._content_forms:
            found = ContentForms(self._shows(role, as_parts=False), self._shows(role, as_parts=True))
            if role != "user" and not any(found):  # it knows no such role
                found = self.content_forms("user")
            self._content_forms[role] = found
        return self._content_forms[role]

    def _shows(self, role: str, as_parts: bool) -> bool:
        probe = "a probe of contents"
        message = {"role": role, "content": [{"type": "text", "text": probe}] if as_parts else probe}
        messages: list[dict[str, Any]] = [message]
        if role != "user":
            asked = self._say("user", "x")
            messages = [message, asked] if role == "system" else [asked, message, asked]
        try:
            shown = self.render(messages)
        except TemplateError:
            return False
        return probe in shown and "'type'" not in shown and '"type"' not in shown

    def _say(self, role: str, text: str) -> dict[str, Any]:
        """A message in a form that is shown."""
        forms = self.content_forms(role)
        return {"role": role, "content": [{"type": "text", "text": text}] if forms.parts and not forms.text else text}

    def writes_pictures(self, marker: str) -> bool:
        """Whether a part `{"type": "image"}` becomes this text; else the caller has to put a text in its place."""
        if marker not in self._picture_markers:
            parts = [{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image"}]
            try:
                shown = self.render([{"role": "user", "content": parts}])
            except TemplateError:
                shown = ""
            self._picture_markers[marker] = shown.count(marker) == 2
        return self._picture_markers[marker]

    def probe(self) -> None:
        """Find out now what is otherwise found out when it is first asked, which waits for the process."""
        for role in _FORMS_OF:
            self.content_forms(role)
        _ = self.needs_single_calls, self.takes_later_system

    def job(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_name: str | None = None,
        **variables: Any,
    ) -> bytes:
        """A conversation for the process to render (`Conversation`), and what is wrong with it that shows before.

        Without `template_name`, that of `tool_use` counts when there are tools, and that of `rag` when there are
        documents instead.
        """
        name = self._choose(template_name, tools is not None, variables.get("documents") is not None)
        if not messages:
            raise TemplateError("`messages` must hold at least one message")
        conversation = Conversation(name, messages, tools, add_generation_prompt, continue_final_message, variables)
        return encode_job(self._templates, conversation)

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt for a conversation, with the options and variables of `job`.

        Raises `TemplateError` when there is no template, or when it fails or refuses the conversation, or takes too
        long or too much memory.
        """
        return read_prompt(self.process.exchange(self.job(messages, tools, **options)))

    def _choose(self, template_name: str | None, has_tools: bool, has_documents: bool) -> str:
        usual = ["default"]
        if has_tools:
            usual = ["tool_use", "default"]
        elif has_documents:
            usual = ["rag", "default"]
        for name in usual if template_name is None else [template_name]:
            if name in self._sources:
                return name
        raise TemplateError("template not found")


def read_prompt(answer: Rendering) -> str:
    """What the process made of a job."""
    if answer.error is not None:
        raise TemplateError(answer.error)
    return answer.text
