"""Reads tool calls out of the text of an answer, while the text comes.

On the way out, behind detokenising and stop strings. What is no call is content, unchanged but for white space around
calls. How the text is cut into pieces makes no difference to what comes out in all.

A call is announced as soon as its function is known and its arguments begin; from then on the arguments are passed on
as the model writes them, but for line breaks within strings, which are escaped. What looked like a call and turns out
before that point not to be one becomes content. A call that a limit cuts off is told as far as it came, and never as
content.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, cast

from text_generation_inference.text.tools.form import MAX_NAME, CallForm
from text_generation_inference.text.tools.formats import ToolFormat
from text_generation_inference.text.tools.forms.plain_json import read_bare
from text_generation_inference.text.tools.reader import (
    EndOfTextError,
    MalformedCallError,
    Reader,
    Steps,
    without_surrogates,
)


@dataclass(frozen=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of the function `name` begins. Calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments of a call. Together they are the text of one JSON object."""

    index: int
    text: str


Event = Content | CallStart | CallArguments
# What the text may be: content and calls in turn; all content or all calls; calls alone. A grammar sees to the latter.
Shape = Literal["mixed", "either", "calls"]

_MAX_SPACE = 64
# Where a call without a marker may begin: at the start of a line, in a code fence or not.
_BARE_START = r"(?m:^)[ \t]{0,64}(?:[{\[]|```\w{0,20}[ \t]*\n)"
_BARE_PARTIAL = r"(?m:^)[ \t]{0,64}(?:`{1,2}|```\w{0,20}[ \t]*)?\Z"
# A call without a marker has no other members than these before its arguments; an answer in JSON has.
_CALL_KEYS = {"name", "function", "tool_name", "type", "id", "tool_call_id", "arguments", "parameters"}


class ToolParser:
    """The content and the calls in one answer."""

    def __init__(
        self, tool_format: ToolFormat, tools: Collection[str] | Mapping[str, Any], shape: Shape = "mixed"
    ) -> None:
        """`tools` are the names of functions, with the JSON schemas of their parameters if they are known."""
        self._shape: Shape = shape
        self._form: CallForm = tool_format.form
        self._special = tool_format.special_markers
        self.names = frozenset(tools)
        self._schemas: Mapping[str, Any] = tools if isinstance(tools, Mapping) else {}
        # Where a grammar decides, it knows the model's own form alone.
        self._starts = _start_pattern(self._form, self._form.bare or (tool_format.bare and shape == "mixed"))
        self.reader = Reader()
        self._events: list[Event] = []
        self._num_calls = 0
        self._space = ""  # white space that is content only if content follows
        self._long_space = False  # more of it than is worth holding back
        self._after_call = False
        self._has_content = False
        self._name: str | None = None  # of the call that is being read and has not begun
        self._steps = self._run()

    def push(self, text: str) -> list[Event]:
        """What the next piece of text tells."""
        self.reader.feed(text)
        next(self._steps, None)
        return self._take_events()

    def finish(self, cut: bool = False) -> list[Event]:
        """What is left, when no more text will come; `cut` when a limit ended it."""
        self.reader.ended, self.reader.cut = True, cut
        next(self._steps, None)
        if not self._after_call:
            self._add_content(self._space)
        self._space = ""
        return self._take_events()

    def _take_events(self) -> list[Event]:
        """All since the last time, with neighbours of one kind made one."""
        events, self._events = self._events, []
        merged: list[Event] = []
        texts: list[str] = []
        for event, following in zip_longest(events, events[1:]):
            if isinstance(event, CallStart):
                merged.append(event)
                continue
            texts.append(event.text)
            if type(event) is not type(following):
                text, texts = "".join(texts), []
                merged.append(Content(text) if isinstance(event, Content) else CallArguments(event.index, text))
        return merged

    # -- what comes out ---------------------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._add_content(self._space + body)
            self._space, self._long_space, self._after_call = "", False, False
            self._has_content = True
        self._space += text[len(body) :]
        if self._long_space or len(self._space) > _MAX_SPACE:
            self._add_content(self._space)
            self._space, self._long_space = "", True

    def _add_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def schema(self, name: str) -> Mapping[str, Any]:
        """As `Calls`, like all public names below."""
        known: object = self._schemas.get(name)
        return cast(Mapping[str, Any], known) if isinstance(known, Mapping) else {}

    def expect(self, name: str | None) -> None:
        self._name = name

    def forget(self) -> None:
        self.reader.taken = []

    def start(self, name: str) -> None:
        self._events.append(CallStart(self._num_calls, name))
        self._num_calls += 1
        self._space, self._long_space, self._after_call = "", False, True
        self.reader.taken = self._name = None

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._num_calls - 1, text))

    # -- what is read -----------------------------------------------------------------------------------------------

    def _run(self) -> Steps[None]:
        reader = self.reader
        while (start := (yield from self._find_start())) is not None:
            num_calls = self._num_calls
            # A special token is hidden from content, as it is everywhere.
            reader.taken = [] if start in self._special else [start]
            self._name = None
            try:
                is_own = self._form.bare or start in self._form.starts
                yield from (self._form.read if is_own else read_bare)(self, start.strip())
            except (MalformedCallError, EndOfTextError) as error:
                taken = "".join(reader.taken or ())
                another = self._num_calls > num_calls
                if isinstance(error, EndOfTextError) and reader.cut and (another or self._is_call(start)):
                    self._cut_call(taken + reader.take(len(reader.unread)), another)
                # Behind a call, what separates it from the next one is no content.
                elif not another or taken.strip(" \t\r\n,;]`"):
                    self._content(taken)
            reader.taken = None

    def _find_start(self) -> Steps[str | None]:
        """Give out content up to where a call may begin, and take what begins it. None at the end of the text."""
        reader = self.reader
        while True:
            match = None if self._is_answer else self._starts.search(reader.text, reader.position)
            end = len(reader.text) if match is None else match.start()
            self._content(reader.take(end - reader.position))
            if self._is_answer:
                self._content(reader.take(len(reader.unread)))
            elif match is not None and (start := match["start"] or match["bare"]):
                return reader.take(len(start))
            if reader.ended:
                rest = reader.take(len(reader.unread))
                begins = any(marker.startswith(rest) for marker in self._form.starts)
                if rest and reader.cut and begins and (self._after_call or self._shape != "mixed"):
                    self._cut_call("", self._after_call)
                else:
                    self._content(rest)
                return None
            yield

    @property
    def _is_answer(self) -> bool:
        """Whether the text is known to hold no calls."""
        return self._shape == "either" and self._has_content

    def _is_call(self, start: str) -> bool:
        """Whether what begins so, and no more is known of than has been read, is a call."""
        return self._name is not None or self._shape == "calls" or start in self._form.starts

    def _cut_call(self, text: str, another: bool) -> None:
        """Tell the call whose function is not known or has no arguments yet, if it can only be one.

        `text` is what there is of it. Behind `another` it may be no more than what separates the two.
        """
        name = self._name
        if name is None and (not another or "{" in text):
            written = self._cut_name(text)
            names = [name for name in self.names if name.startswith(written)]
            name = names[0] if len(names) == 1 else None
        if name is not None:
            self.start(name)

    def _cut_name(self, text: str) -> str:
        """What a call that was cut off says of its function's name: the beginning of it, or nothing."""
        for marker in self._form.starts:
            text = text.removeprefix(marker)
        return self._form.cut_name(text.strip())

    def read_json(self, names: Collection[str] | None, bracket: str = "") -> Steps[None]:
        """Calls as objects, alone or in a list, whose first `bracket` may have been taken already.

        With `names`, only calls of these are calls.
        """
        reader = self.reader
        if not bracket:
            yield from reader.skip_space()
            bracket = yield from reader.expect("{[")
        is_list = bracket == "["
        if is_list:
            yield from reader.skip_space()
            yield from reader.expect("{")
        while True:
            yield from self._read_object(names)
            reader.taken = []
            yield from reader.skip_space()
            if is_list:
                if (yield from reader.expect(",]")) == "]":
                    return
            elif not self._form.bare and names is None:
                return
            elif (yield from reader.peek()) in ";,":
                reader.take(1)
            yield from reader.skip_space()
            if not is_list and (yield from reader.peek()) != "{":
                return
            yield from reader.expect("{")

    def _read_object(self, names: Collection[str] | None) -> Steps[None]:
        """One call as an object, behind its bracket."""
        reader = self.reader
        name: str | None = None
        arguments: str | None = None  # until the name is known, or for good
        self._name = None
        num_calls = self._num_calls
        while True:
            yield from reader.skip_space()
            if (yield from reader.peek()) == "}":
                break
            key = yield from reader.take_string()
            if names is not None and self._num_calls == num_calls and key not in _CALL_KEYS:
                self._give_up()
            yield from reader.skip_space()
            yield from reader.expect(":")
            yield from reader.skip_space()
            first = yield from reader.peek()
            if self._num_calls > num_calls:
                yield from reader.take_value(_ignore)
            elif key in ("name", "tool_name") or (key == "function" and first == '"'):
                name = yield from reader.take_string()
                self._check_name(name, names)
                self._name = name
            elif key == "function" and first == "{":
                name, arguments = _read_function((yield from self._buffer_value()))
                self._check_name(name, names)
            elif key in ("arguments", "parameters") and first == "{" and name is not None:
                self.start(name)
                yield from reader.take_value(self.arguments)
            elif key in ("arguments", "parameters"):
                arguments = _as_object((yield from self._buffer_value()))
            else:
                yield from reader.take_value(_ignore)
            if self._num_calls == num_calls and name is not None and arguments is not None:
                self.start(name)
                self.arguments(arguments)
            yield from reader.skip_space()
            if (yield from reader.peek()) != "}":
                yield from reader.expect(",")
        if self._num_calls == num_calls:
            if name is None or names is not None:
                raise MalformedCallError
            self.start(name)
            self.arguments("{}")
        reader.take(1)

    def _check_name(self, name: str, names: Collection[str] | None) -> None:
        if not name or len(name) > MAX_NAME:
            raise MalformedCallError
        if names is not None and name not in names:
            self._give_up()

    def _give_up(self) -> None:
        """The answer is JSON and no call, so what looks like one in the rest of it is none either."""
        self._starts = _start_pattern(self._form, bare=False)
        raise MalformedCallError

    def _buffer_value(self) -> Steps[str]:
        pieces: list[str] = []
        yield from self.reader.take_value(pieces.append)
        return "".join(pieces)

    def read_arguments(self, name: str) -> Steps[None]:
        reader = self.reader
        if not name or len(name) > MAX_NAME or (yield from reader.peek()) != "{":
            raise MalformedCallError
        self.start(name)
        yield from reader.take_value(self.arguments)


def _start_pattern(form: CallForm, bare: bool) -> re.Pattern[str]:
    """Matches what begins a call, as `start` or `bare`, or the end of the text when it may be the beginning of that.

    A bracket may begin a marker, and is a call without one only when it does not.
    """
    never = "(?!)"
    starts = [re.escape(marker) for marker in form.starts] or [never]
    partials = [re.escape(marker[:size]) + r"\Z" for marker in form.starts for size in range(len(marker) - 1, 0, -1)]
    bare_start, bare_partial = (_BARE_START, _BARE_PARTIAL) if bare else (never, never)
    return re.compile("|".join([f"(?P<start>{'|'.join(starts)})", *partials, f"(?P<bare>{bare_start})", bare_partial]))


def _read_function(text: str) -> tuple[str, str]:
    """The name and the arguments in a member `function`: TGI's form, with the name among the arguments, or OpenAI's."""
    try:
        value = cast(dict[str, Any], json.loads(text))
    except (ValueError, RecursionError):
        raise MalformedCallError from None
    if isinstance(name := value.pop("_name", None), str):
        return without_surrogates(name), _as_text(value)
    arguments: object = value.get("arguments", value.get("parameters", {}))
    # With a description it is a tool shown, not called.
    if not isinstance(name := value.get("name"), str) or isinstance(value.get("description"), str):
        raise MalformedCallError
    return without_surrogates(name), _as_object(_as_text(arguments))


def _as_text(value: object) -> str:
    return without_surrogates(json.dumps(value, ensure_ascii=False))


def _as_object(text: str) -> str:
    """Arguments as the text of an object: some models write them as a string that holds it, or as null."""
    if text.startswith('"'):
        text = cast(str, json.loads(text)).strip()
    if text == "null":
        return "{}"
    if not (text.startswith("{") and text.endswith("}")):
        raise MalformedCallError
    return text


def _ignore(text: str) -> None:
    """For values that mean nothing here."""
