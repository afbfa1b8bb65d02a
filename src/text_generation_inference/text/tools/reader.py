"""Reads text that arrives in pieces, as generators that stop where the next piece is needed.

Below `parser`, which decides what to look for. Every character is looked at once, however the text is cut.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields when it needs more text

_SPACE = re.compile(r"\s+")
_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["\\\x00-\x1f]')  # in a string, with what JSON has only escapes for
_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[\w.+-]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSERS = {"{": "}", "[": "]"}


class MalformedCallError(Exception):
    """The text is not what was looked for. What is wrong has not been taken."""


class EndOfTextError(Exception):
    """No more text will come, and some was needed."""


def without_surrogates(text: str) -> str:
    """JSON can say half of a pair of surrogates, which no encoding of text can."""
    return _SURROGATE.sub("\ufffd", text)


class Reader:
    """The text not yet taken. While `taken` is a list, it collects what is taken."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.cut = False  # ended by a limit, not by the one who writes
        self.taken: list[str] | None = None

    def feed(self, text: str) -> None:
        # One character is kept behind, by which a pattern knows the start of a line.
        start = max(0, self.position - 1)
        self.text = self.text[start:] + text
        self.position -= start

    @property
    def unread(self) -> str:
        return self.text[self.position :]

    def take(self, count: int) -> str:
        piece = self.text[self.position : self.position + count]
        self.position += len(piece)
        if self.taken is not None:
            self.taken.append(piece)
        return piece

    def peek(self) -> Steps[str]:
        """The next character."""
        while self.position >= len(self.text):
            if self.ended:
                raise EndOfTextError
            yield
        return self.text[self.position]

    def expect(self, characters: str) -> Steps[str]:
        """Take the next character, which must be one of these."""
        if (yield from self.peek()) not in characters:
            raise MalformedCallError
        return self.take(1)

    def take_all(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take characters as long as `pattern`, made for one or more of a kind, matches."""
        pieces: list[str] = []
        while True:
            match = pattern.match(self.text, self.position)
            if match is not None:
                pieces.append(self.take(len(match.group())))
            if self.position < len(self.text) or self.ended:
                return "".join(pieces)
            yield

    def skip_space(self) -> Steps[str]:
        return (yield from self.take_all(_SPACE))

    def try_literal(self, literal: str) -> Steps[bool]:
        """Take `literal` if it comes next."""
        found = yield from self.sees(literal)
        if found:
            self.take(len(literal))
        return found

    def sees(self, literal: str) -> Steps[bool]:
        """Whether `literal` comes next."""
        while True:
            unread = self.text[self.position : self.position + len(literal)]
            if unread == literal:
                return True
            if not literal.startswith(unread):
                return False
            if self.ended:
                if self.cut and unread:
                    raise EndOfTextError
                return False
            yield

    def take_until(self, literal: str, limit: int) -> Steps[str]:
        """Take the text before `literal`, at most `limit` characters of it, and `literal`."""
        while True:
            end = self.text.find(literal, self.position, self.position + limit + len(literal))
            if end >= 0:
                head = self.take(end - self.position)
                self.take(len(literal))
                return head
            if len(self.text) - self.position > limit + len(literal):
                raise MalformedCallError
            if self.ended:
                raise EndOfTextError
            yield

    def take_text(self, literal: str) -> Steps[str]:
        """Take the text before `literal`, however long, and `literal`."""
        pieces: list[str] = []
        while True:
            end = self.text.find(literal, self.position)
            if end >= 0:
                pieces.append(self.take(end - self.position))
                self.take(len(literal))
                return "".join(pieces)
            if self.ended:
                raise EndOfTextError
            unread = self.unread
            sizes = range(min(len(unread), len(literal) - 1), 0, -1)
            kept = next((size for size in sizes if literal.startswith(unread[-size:])), 0)
            pieces.append(self.take(len(unread) - kept))
            yield

    def take_string(self) -> Steps[str]:
        """Take a JSON string and return what it means, as text that can be sent."""
        pieces = [(yield from self.expect('"'))]
        while True:
            yield from self.peek()
            match = _IN_STRING.search(self.text, self.position)
            if match is None:
                pieces.append(self.take(len(self.text) - self.position))
                continue
            pieces.append(self.take(match.end() - self.position))
            if match.group() == '"':
                break
            yield from self.peek()
            pieces.append(self.take(1))
        try:
            return without_surrogates(json.loads("".join(pieces), strict=False))
        except ValueError:
            raise MalformedCallError from None

    def take_value(self, emit: Callable[[str], object]) -> Steps[None]:
        """Take a JSON value and give its text to `emit` as it comes.

        Line breaks and the like within strings, which models write as they are, become what JSON has for them.
        """
        first = yield from self.peek()
        if first in _CLOSERS:
            yield from self._take_nested(emit)
        elif first == '"':
            emit(json.dumps((yield from self.take_string()), ensure_ascii=False))
        else:
            scalar = yield from self.take_all(_SCALAR)
            if self.cut and self.position == len(self.text):
                raise EndOfTextError
            if not scalar:
                raise MalformedCallError
            emit(scalar)

    def _take_nested(self, emit: Callable[[str], object]) -> Steps[None]:
        closers: list[str] = []
        in_string = escaped = False
        while True:
            yield from self.peek()
            text, start, position = self.text, self.position, self.position
            if escaped:
                position, escaped = position + 1, False
            while position < len(text):
                match = (_IN_VALUE if in_string else _OUTSIDE_STRING).search(text, position)
                if match is None:
                    position = len(text)
                    break
                char, position = match.group(), match.end()
                if char == "\\":
                    escaped = position == len(text)
                    position += not escaped
                elif char < " ":
                    emit(self.take(position - 1 - start))
                    emit(json.dumps(self.take(1))[1:-1])
                    start = position
                elif char == '"':
                    in_string = not in_string
                elif char in _CLOSERS:
                    closers.append(_CLOSERS[char])
                elif char != closers.pop():
                    emit(self.take(position - 1 - start))
                    raise MalformedCallError
                elif not closers:
                    emit(self.take(position - start))
                    return
            emit(self.take(position - start))
