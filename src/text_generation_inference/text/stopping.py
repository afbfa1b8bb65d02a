"""Finds stop strings in text that arrives in pieces.

On the way out, between detokenising and the client. Owns the text that may still turn out to be part of a stop string.
Knows nothing of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Search:
    """One stop string and how much of it the end of the text matches (Knuth, Morris and Pratt)."""

    stop: str
    borders: list[int]  # borders[i]: length of the longest proper prefix of stop[: i + 1] that also ends it
    matched: int = 0

    @classmethod
    def of(cls, stop: str) -> "_Search":
        search = cls(stop, [0] * len(stop))
        for i in range(1, len(stop)):
            search.borders[i] = search._extend(search.borders[i - 1], stop[i])
        return search

    def push(self, char: str) -> bool:
        """Take the next character; true when it completes the stop string."""
        if self.matched == len(self.stop):  # it was complete, and nobody stopped
            self.matched = self.borders[-1]
        self.matched = self._extend(self.matched, char)
        return self.matched == len(self.stop)

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self.borders[matched - 1]
        return matched + 1 if self.stop[matched] == char else 0


class StopStrings:
    """Ends a text at the first of some stop strings.

    The first is the one that is complete first; of several that end at the same place, the longest. How the text is
    split into pieces makes no difference, except with `only_at_end` or `whole_pieces`.
    """

    def __init__(
        self, stops: Sequence[str], include_stop: bool, only_at_end: bool = False, whole_pieces: bool = False
    ) -> None:
        """With `include_stop` the text ends after the stop string, else before it.

        `only_at_end` is the rule of TGI's own routes: a stop string counts only when a piece ends with it, or with it
        and one newline, and the text is left as it is. With `whole_pieces` too a piece must end with it: a piece is a
        number then, of which a part means nothing.
        """
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        if only_at_end and not include_stop:
            raise ValueError("only_at_end keeps the stop string, so it needs include_stop")
        self._include_stop = include_stop
        self._whole_pieces = whole_pieces
        self._searches = [] if only_at_end else [_Search.of(stop) for stop in dict.fromkeys(stops)]
        self._held = ""  # may be the beginning of a stop string
        self._endings = tuple(ending for stop in stops for ending in (stop, stop + "\n")) if only_at_end else ()
        self._longest_ending = max(map(len, self._endings), default=0)
        self._tail = ""  # end of the text, as long as the longest ending
        self._stopped = False
        self.found = ""  # the stop string that ended the text, where it is looked for as a string

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stopped

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return the text that is safe to give out, and whether a stop string was found."""
        if self._stopped:
            return "", True
        if self._endings:
            return self._push_at_end(text)
        if not self._searches:
            return text, False
        for i, char in enumerate(text):
            # Every search takes every character, also when one has found its end: the longest counts.
            found = [search.stop for search in self._searches if search.push(char)]
            if found and not (self._whole_pieces and i + 1 < len(text)):
                self._stopped, self.found = True, max(found, key=len)
                known = self._held + text[: i + 1]
                self._held = ""
                return known if self._include_stop else known[: -len(self.found)], True
        if self._include_stop:
            return text, False
        known = self._held + text
        safe = len(known) - max(search.matched for search in self._searches)
        self._held = known[safe:]
        return known[:safe], False

    def insert(self, text: str) -> str:
        """Put in a text that is not searched. No stop string goes across it, so what was held back comes first."""
        if self._stopped:
            return ""
        for search in self._searches:
            search.matched = 0
        self._tail = ""
        return self.flush() + text

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held

    def _push_at_end(self, text: str) -> tuple[str, bool]:
        self._tail = (self._tail + text)[-self._longest_ending :]
        self._stopped = self._tail.endswith(self._endings)
        return text, self._stopped
