"""Thinking between two tags, at the beginning of an answer.

White space around thoughts and before the answer behind them is left out. An opening tag further on is a part of the
answer, which may be about such tags.
"""

import re
from dataclasses import dataclass
from typing import Literal

_MAX_SPACE = 64  # white space held back that may turn out to be the end of the thoughts
_MAX_SPACE_BEFORE = 1024  # likewise that may turn out to stand before the opening tag; an answer begins with more


@dataclass(frozen=True)
class Tags:
    opens: tuple[str, ...]
    closes: tuple[str, ...]

    def are_open(self, prompt: str, continued: str) -> bool:
        """Whether a prompt ends inside the tags: the model's first word is a thought.

        `continued` are words of the model's own that the prompt ends with.
        """
        opened = max(continued.rfind(tag) for tag in self.opens)
        closed = max(continued.rfind(tag) for tag in self.closes)
        return opened > closed or prompt.rstrip().endswith(self.opens)


class TagSplitter:
    def __init__(self, tags: Tags, opened: bool) -> None:
        self._opens, self._closes = tags.opens, tags.closes
        # `before`: nothing but white space yet. `opened`: thoughts are to begin. `behind`: thoughts have just ended.
        self._state: Literal["before", "opened", "inside", "behind", "answer"] = "opened" if opened else "before"
        self._repeats = opened  # some models write the tag although the prompt had it
        self._held = ""
        self._close = re.compile("|".join(map(re.escape, self._closes)))
        self._partial = re.compile(
            "|".join(rf"{re.escape(tag[:size])}\Z" for tag in self._closes for size in range(len(tag) - 1, 0, -1))
        )

    def push(self, text: str) -> tuple[str, list[str]]:
        if self._state == "answer":
            return "", [text]
        text, self._held = self._held + text, ""
        thoughts = ""
        if self._state == "before":
            text = self._begin(text)
        if self._state == "opened":
            text = self._open(text)
        if self._state == "inside":
            thoughts, text = self._think(text)
        if self._state == "behind":
            text = text.lstrip()
            if text:
                self._state = "answer"
        return thoughts, [text] if self._state == "answer" else []

    def finish(self) -> tuple[str, list[str]]:
        held, self._held = self._held, ""
        if self._state == "inside":
            return held.rstrip(), []
        if self._state == "opened":
            return held.strip(), []
        return "", [held]

    def _begin(self, text: str) -> str:
        """Look for the opening tag behind white space."""
        words = text.lstrip()
        is_long = len(text) - len(words) > _MAX_SPACE_BEFORE
        if words.startswith(self._opens) and not is_long:
            self._state = "opened"
            return self._without_open(words)
        if any(tag.startswith(words) for tag in self._opens) and not is_long:
            self._held = text
            return ""
        self._state = "answer"
        return text

    def _open(self, text: str) -> str:
        """Leave out white space before the first thought, and the tag if it comes a second time."""
        words = text.lstrip()
        if self._repeats and words.startswith(self._opens):
            self._repeats = False
            words = self._without_open(words).lstrip()
        elif self._repeats and words and any(tag.startswith(words) for tag in self._opens):
            self._held = words
            return ""
        if words:
            self._state = "inside"
        return words

    def _without_open(self, words: str) -> str:
        return words.removeprefix(next(tag for tag in self._opens if words.startswith(tag)))

    def _think(self, text: str) -> tuple[str, str]:
        """The thoughts in `text`, and what is behind them."""
        close = self._close.search(text)
        if close is not None:
            self._state = "behind"
            return _without_space(text[: close.start()]), text[close.end() :]
        partial = self._partial.search(text)
        end = len(text) if partial is None else partial.start()
        thoughts = _without_space(text[:end])
        self._held = text[len(thoughts) :]
        return thoughts, ""


def _without_space(text: str) -> str:
    """Without the white space at its end, of which at most so much is left out."""
    return text[: max(len(text.rstrip()), len(text) - _MAX_SPACE)]
