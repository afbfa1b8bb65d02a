"""Room for thoughts before an answer that a grammar decides: one grammar of both.

Thoughts are any text up to the mark that ends them, whether that is one token or spelt out; what follows is held to the
grammar. Written in llguidance's Lark, in which a token that is a mark (`<[id]>`) is never a part of a text.
"""

import json
import re
from collections.abc import Sequence

from text_generation_inference.text.grammar import lark_term
from text_generation_inference.text.reasoning.formats import ReasoningFormat
from text_generation_inference.text.reasoning.harmony import ANALYSIS_PARTS, MARKERS, THOUGHTS_END, answer_header
from text_generation_inference.text.tokenizer import Tokenizer
from text_generation_inference.types import Grammar

_START = "start: "
_ANY = "/(?s:.*)/"
_SPACE = r"/\s{0,8}/"
_MEANINGFUL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")  # in an expression


def with_thoughts(form: ReasoningFormat, grammar: Grammar, opened: bool, tokenizer: Tokenizer) -> Grammar:
    """Thoughts, which may be left out unless the prompt has `opened` them, then what `grammar` says."""
    rules = _Rules(tokenizer)
    before = rules.analysis() if form.tags is None else rules.tagged(form.tags.opens, form.tags.closes, opened)
    if grammar.kind == "lark":  # of tool calls: its own rules, whose first is `start`
        body, *others = grammar.value.removeprefix(_START).rstrip("\n").split("\n")
    else:
        body, others = " ".join((*before_answer(form, tokenizer), lark_term(grammar))), []
    lines = [f"{_START}{before} body", f"body: {body}", *rules.lines, *others]
    return Grammar("lark", "\n".join(lines) + "\n")


def before_answer(form: ReasoningFormat | None, tokenizer: Tokenizer) -> list[str]:
    """Terms of what stands between thoughts and an answer that is no call."""
    if form is None or form.tags is not None:
        return []
    return [_term(text, tokenizer) for text in answer_header(calls=False)[len(THOUGHTS_END) :]]


class _Rules:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lines: list[str] = []

    def tagged(self, opens: Sequence[str], closes: Sequence[str], opened: bool) -> str:
        self._thoughts(closes)
        self.lines.append(f"SPACE: {_SPACE}")
        starts = [f"SPACE {term}" for term in self._as_tokens(opens)]
        if opened:  # some models write the mark although the prompt had it
            return f"({' | '.join(starts)})? thoughts SPACE" if starts else "thoughts SPACE"
        self.lines += [f"open: {' | '.join(['OPEN', *starts])}", rf"OPEN: /\s{{0,8}}({_one_of(opens)})/"]
        return "(open thoughts SPACE)?"

    def analysis(self) -> str:
        """Any number of messages on Harmony's channel for thoughts."""
        self._thoughts(THOUGHTS_END[:1])
        parts = (*ANALYSIS_PARTS, None, *THOUGHTS_END[1:])
        terms = ["thoughts" if part is None else _term(part, self._tokenizer) for part in parts]
        self.lines.append(f"analysis: {' '.join(terms)}")
        return "analysis*"

    def _thoughts(self, closes: Sequence[str]) -> None:
        """Any text up to one of these and with it."""
        ends = [f"TEXT {term}" for term in self._as_tokens(closes)]
        self.lines += [
            f"thoughts: {' | '.join(['spelt', *ends])}",
            f"spelt[lazy]: /(?s:.*)({_one_of(closes)})/",
            f"TEXT: {_ANY}",
        ]

    def _as_tokens(self, marks: Sequence[str]) -> list[str]:
        """Those that the tokenizer knows, alone or with a word behind them, as terms."""
        return [" ".join(f"<[{i}]>" for i in ids) for ids in (mark_ids(mark, self._tokenizer) for mark in marks) if ids]


def _one_of(marks: Sequence[str]) -> str:
    return "|".join(_MEANINGFUL.sub(r"\\\g<0>", mark) for mark in marks)


def _term(text: str, tokenizer: Tokenizer) -> str:
    token_id = tokenizer.id_of(text) if text in MARKERS else None
    return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def mark_ids(mark: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a mark that is one, or begins with one that is special; none for others, which are plain text."""
    if (token_id := tokenizer.id_of(mark)) is not None:
        return [token_id]
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids if any(token_id in tokenizer.special_ids for token_id in ids) else []
