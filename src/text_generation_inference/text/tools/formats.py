"""Which form of tool call a model writes, told from its template and its tokens.

Read once when a model is loaded; `parser` and `forced` work from the result.
"""

import re
from dataclasses import dataclass
from typing import Literal

from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.tokenizer import Tokenizer

# hermes:       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, also Qwen's
# llama3:       {"name": ..., "parameters": {...}}, behind <|python_tag|> or not
# mistral:      [TOOL_CALLS][{"name": ..., "arguments": {...}}]
# mistral_args: [TOOL_CALLS]name[ARGS]{...}
# deepseek:     <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then the arguments in a code fence
# json:         an object or a list of objects, for models that learnt no form
Family = Literal["hermes", "llama3", "mistral", "mistral_args", "deepseek", "json"]

# The texts that mean something to the parser, first the one that begins a call. Their tokens must not be hidden.
MARKERS: dict[Family, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "mistral_args": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "deepseek": (
        "<｜tool▁call▁begin｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "json": (),
}
# The families whose calls may come without a marker, and are told from content by what they hold.
BARE: frozenset[Family] = frozenset({"llama3", "json"})


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls."""

    family: Family
    marker_ids: tuple[tuple[str, int], ...] = ()  # of those markers that are one token
    special_markers: frozenset[str] = frozenset()  # those that decoding hides

    @property
    def shown_ids(self) -> frozenset[int]:
        """The special tokens whose text the parser must be given all the same."""
        return frozenset(token_id for marker, token_id in self.marker_ids if marker in self.special_markers)

    @property
    def bare(self) -> bool:
        """Whether a call may come without a marker."""
        return self.family in BARE

    @property
    def short_ids(self) -> bool:
        """Whether the model's template wants ids of nine letters and digits."""
        return self.family.startswith("mistral")


def detect_tool_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat:
    """The form the template shows to the model; the tokens decide where it shows none."""
    family = _detect_family(template, tokenizer)
    found = [(marker, tokenizer.id_of(marker)) for marker in MARKERS[family]]
    marker_ids = tuple((marker, token_id) for marker, token_id in found if token_id is not None)
    special = frozenset(marker for marker, token_id in marker_ids if token_id in tokenizer.skipped_ids)
    return ToolFormat(family, marker_ids, special)


def _detect_family(template: ChatTemplate, tokenizer: Tokenizer) -> Family:
    source = "\n".join(template.sources.values())
    if "[TOOL_CALLS]" in source:
        return "mistral_args" if "[ARGS]" in source else "mistral"
    if "<｜tool▁call▁begin｜>" in source:
        return "deepseek"
    if "<tool_call>" in source:
        return "hermes"
    if "<|python_tag|>" in source:
        return "llama3"
    if template.uses_tools:
        # Llama 3.2's template describes the form in words; others leave it to the tokens altogether.
        if tokenizer.id_of("<|python_tag|>") is not None and re.search(r"\bparameters\b", source):
            return "llama3"
        by_token: dict[str, Family] = {"[TOOL_CALLS]": "mistral", "<tool_call>": "hermes"}
        for marker, family in by_token.items():
            if tokenizer.id_of(marker) is not None:
                return family
    return "json"
