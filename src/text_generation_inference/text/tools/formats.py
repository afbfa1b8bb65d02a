"""Which form of tool call a model writes, told from its template and its tokens.

Read once when a model is loaded; `parser` and `forced` work from the result.
"""

import re
from dataclasses import dataclass

from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.text.tools.form import CallForm
from text_generation_inference.text.tools.forms import FORMS


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls."""

    family: str
    marker_ids: tuple[tuple[str, int], ...] = ()  # of those markers that are one token
    special_markers: frozenset[str] = frozenset()  # those that decoding hides
    bare: bool = False  # the model is asked for calls by the tool prompt too, in JSON without markers

    @property
    def shown_ids(self) -> frozenset[int]:
        """The special tokens whose text the parser must be given all the same."""
        return frozenset(token_id for marker, token_id in self.marker_ids if marker in self.special_markers)

    @property
    def form(self) -> CallForm:
        return FORMS[self.family]


def detect_tool_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat:
    """The form the template shows to the model; the tokens decide where it shows none."""
    family = _detect_family(template, tokenizer)
    found = [(marker, tokenizer.id_of(marker)) for marker in FORMS[family].markers]
    marker_ids = tuple((marker, token_id) for marker, token_id in found if token_id is not None)
    special = frozenset(marker for marker, token_id in marker_ids if token_id in tokenizer.skipped_ids)
    return ToolFormat(family, marker_ids, special, not template.uses_tools)


# Texts in a template that tell the form, those that say more first.
_WRITTEN = {
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁call▁begin｜>": "deepseek_args",
    "<|tool_call_begin|>": "kimi",
    "to=functions.": "harmony",
    "<|START_ACTION|>": "cohere",
    "<|tool_call|>": "tagged_list",
    "<minimax:tool_call>": "minimax",
    "<｜DSML｜": "dsml",
    "<seed:tool_call>": "seed",
    "<|tool_call_start|>": "pythonic",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3",
    "<|python_start|>": "llama3",
}
# Forms that share a text with another one, and what tells them apart.
_VARIANTS = {
    "mistral": {"[ARGS]": "mistral_args"},
    "deepseek_args": {"```json": "deepseek"},
    "hermes": {"<function=": "qwen_xml", "<arg_key>": "glm"},
}
_BY_TOKEN = {"[TOOL_CALLS]": "mistral", "<tool_call>": "hermes"}
_PYTHONIC = re.compile(r"\[\s*\w+\(\s*\w+\s*=")  # a list of calls, as templates show it
_ACTION = re.compile(r"Action:.*```json", re.DOTALL)  # Command R


def _detect_family(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    source = "\n".join(template.sources.values())
    for text, family in _WRITTEN.items():
        if text in source:
            variants = _VARIANTS.get(family, {})
            return next((variant for mark, variant in variants.items() if mark in source), family)
    if "<|tool|>" in source and tokenizer.id_of("<|tool_call|>") is not None:  # Phi-4-mini, which shows no call
        return "tagged_list"
    if template.uses_tools:
        if _ACTION.search(source) and "<|START_OF_TURN_TOKEN|>" in source:
            return "cohere"
        if _PYTHONIC.search(source):
            return "pythonic"
        # Llama 3.2's template describes the form in words; others leave it to the tokens altogether.
        if tokenizer.id_of("<|python_tag|>") is not None and re.search(r"\bparameters\b", source):
            return "llama3"
        for marker, family in _BY_TOKEN.items():
            if tokenizer.id_of(marker) is not None:
                return family
    return "json"
