"""Reads Python's literals out of text that arrives in pieces, as the text of JSON: for calls written as Python."""

import json
import re
from collections.abc import Callable

from text_generation_inference.text.tools.reader import (
    EndOfTextError,
    MalformedCallError,
    Reader,
    Steps,
    without_surrogates,
)

_MAX_DEPTH = 32
_MAX_DIGITS = 400  # more are no number that anyone can read
_SCALAR = re.compile(r"[\w.+-]+")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_MEANINGS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null"} | {word: word for word in ("true", "false", "null")}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def take_python_value(reader: Reader, depth: int = 0) -> Steps[str]:
    """Take a literal and return its JSON: a string, number, True, False, None; a list, tuple or dictionary of these."""
    first = yield from reader.peek()
    if first in "\"'":
        return _as_json((yield from _take_string(reader)))
    if first not in _CLOSERS:
        return (yield from _take_scalar(reader))
    if depth == _MAX_DEPTH:
        raise MalformedCallError
    reader.take(1)
    item = _take_pair if first == "{" else take_python_value
    items = yield from _take_items(reader, _CLOSERS[first], lambda: item(reader, depth + 1))
    return f"{{{', '.join(items)}}}" if first == "{" else f"[{', '.join(items)}]"


def _take_items(reader: Reader, closer: str, take: Callable[[], Steps[str]]) -> Steps[list[str]]:
    items: list[str] = []
    while True:
        yield from reader.skip_space()
        if (yield from reader.peek()) == closer:
            break
        items.append((yield from take()))
        yield from reader.skip_space()
        if (yield from reader.peek()) != closer:
            yield from reader.expect(",")
    reader.take(1)
    return items


def _take_pair(reader: Reader, depth: int) -> Steps[str]:
    key = yield from take_python_value(reader, depth)
    if key[0] in "[{":
        raise MalformedCallError
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    value = yield from take_python_value(reader, depth)
    return f"{key}: {value}" if key.startswith('"') else f"{json.dumps(key)}: {value}"


def _take_scalar(reader: Reader) -> Steps[str]:
    scalar = yield from reader.take_all(_SCALAR)
    if reader.position == len(reader.text) and reader.cut:
        raise EndOfTextError
    if scalar in _WORDS:
        return _WORDS[scalar]
    try:
        if not scalar or len(scalar) > _MAX_DIGITS or scalar[0].isalpha():
            raise MalformedCallError
        plain = scalar.replace("_", "")
        number = int(plain, 0) if re.fullmatch(r"[+-]?(0[xXoObB][0-9a-fA-F]+|[1-9][0-9]*|0)", plain) else float(plain)
        return json.dumps(number, allow_nan=False)
    except ValueError:
        raise MalformedCallError from None


def _take_string(reader: Reader) -> Steps[str]:
    """What a string means, in one quote or in three."""
    quote = reader.take(1)
    if (yield from reader.peek()) == quote:
        reader.take(1)
        try:
            is_long = (yield from reader.peek()) == quote
        except EndOfTextError:
            if reader.cut:
                raise
            is_long = False
        if not is_long:
            return ""
        reader.take(1)
        quote *= 3
    pieces: list[str] = []
    found = re.compile(rf"\\|{quote}")
    partial = quote[:-1] if len(quote) == 3 else ""  # the end of the text may be its beginning
    while True:
        match = found.search(reader.text, reader.position)
        if match is None:
            unread = len(reader.text) - reader.position
            kept = min(len(partial), unread)
            pieces.append(reader.take(unread - kept))
            if reader.ended:
                raise EndOfTextError
            yield
            continue
        pieces.append(reader.take(match.start() - reader.position))
        if match.group() == quote:
            reader.take(len(quote))
            return _unescaped("".join(pieces))
        while len(reader.text) - reader.position < 2:
            if reader.ended:
                raise EndOfTextError
            yield
        pieces.append(reader.take(2))


def _unescaped(text: str) -> str:
    """The escapes of a string as what they mean; those that mean nothing stay, as in Python."""
    if "\\" not in text:
        return text
    text = _ESCAPE.sub(_meaning, text)
    # Halves of a pair of surrogates, written one by one, are one character.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _meaning(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is not None:
        number = int(digits, 16)
        return chr(number) if number <= 0x10FFFF else match[0]
    character = match[4]
    return character if character in "\\'\"" else _MEANINGS.get(character, match[0])


def _as_json(text: str) -> str:
    return json.dumps(without_surrogates(text), ensure_ascii=False)
