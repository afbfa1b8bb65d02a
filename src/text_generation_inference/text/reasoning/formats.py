"""How a model marks its thinking, told from its template and its tokens. Read once when a model is loaded."""

from dataclasses import dataclass
from typing import Protocol

from text_generation_inference.text.chat_template import ChatTemplate
from text_generation_inference.text.reasoning.harmony import MARKERS as HARMONY
from text_generation_inference.text.reasoning.harmony import HarmonySplitter
from text_generation_inference.text.reasoning.tags import Tags, TagSplitter
from text_generation_inference.text.tokenizer import Tokenizer

TAGS = (
    Tags(("<think>",), ("</think>",)),  # DeepSeek-R1, Qwen3, QwQ, GLM, SmolLM3 and most others
    Tags(("[THINK]",), ("[/THINK]",)),  # Magistral
    Tags(("<seed:think>",), ("</seed:think>",)),
    Tags(("<|START_THINKING|>",), ("<|END_THINKING|>",)),  # Command A
    Tags(("<|channel>thought",), ("<channel|>",)),  # Gemma 4
    Tags(  # Granite 3.2, in plain words
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
)


class Splitter(Protocol):
    """Tells thoughts from the answer in a text that comes in pieces. How it is cut makes no difference in all."""

    def push(self, text: str) -> tuple[str, list[str]]:
        """What the next piece adds to the thoughts and to the answer, some of which may be `Inserted`."""
        ...

    def finish(self) -> tuple[str, list[str]]:
        """What was held back, when no more text will come."""
        ...


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its thinking: by tags around it, or (None) by the channels of Harmony."""

    tags: Tags | None
    shown_ids: frozenset[int] = frozenset()  # special tokens whose text the splitter needs

    @property
    def name(self) -> str:
        return "Harmony" if self.tags is None else f"{self.tags.opens[0]} ... {self.tags.closes[0]}"

    @property
    def always_marks(self) -> bool:
        """Whether every answer has marks, also one without thoughts: then it cannot be read without a splitter."""
        return self.tags is None

    def split(self, opened: bool, calls: bool) -> Splitter:
        """A splitter for one answer. `opened`: the prompt ends inside the tags. `calls`: the answer may call."""
        if self.tags is None:
            return HarmonySplitter(calls)
        return TagSplitter(self.tags, opened)

    def is_opened_by(self, prompt: str, continued: str) -> bool:
        """Whether the first word behind a prompt is a thought; `continued` as in `Tags.are_open`."""
        return self.tags is not None and self.tags.are_open(prompt, continued)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether a prompt ends with thoughts that are over, as templates write them to leave no room for others."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags.closes)


def detect_reasoning_format(template: ChatTemplate, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The marks that the template writes or cuts out of messages; or that are tokens. None for other models."""
    source = "\n".join(template.sources.values())
    if "<|channel|>" in source and "<|message|>" in source:
        return ReasoningFormat(None, _special_ids(HARMONY, tokenizer))
    written = [tags for tags in TAGS if any(close in source for close in tags.closes)]
    known = [tags for tags in TAGS if all(tokenizer.id_of(text) is not None for text in (*tags.opens, *tags.closes))]
    if not template.found or not (found := [*written, *known]):
        return None
    return ReasoningFormat(found[0], _special_ids((*found[0].opens, *found[0].closes), tokenizer))


def _special_ids(texts: tuple[str, ...], tokenizer: Tokenizer) -> frozenset[int]:
    """Those that are tokens which decoding hides. A mark may be a token and a word behind it."""
    tokens = {token_id: tokenizer.token_of(token_id) for token_id in tokenizer.skipped_ids}
    return frozenset(key for key, token in tokens.items() if token and any(text.startswith(token) for text in texts))
