"""Answers of GPT-OSS: messages on channels, each with a header.

`analysis` is thinking, `final` and `commentary` are the answer, and a message to a function is a call. A call is handed
on in one form, for the parser of calls: the name in the header, then the arguments.
"""

import re

MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
CALL_START = "<|channel|>commentary to=functions."  # then the name
CALL_MESSAGE = "<|message|>"  # then the arguments

_CHANNEL, _MESSAGE, _START, _END, _ = MARKERS
ANALYSIS_PARTS = (_CHANNEL, "analysis", _MESSAGE)
ANALYSIS = "".join(ANALYSIS_PARTS)  # begins a message of thoughts
BODY_ENDS = (_END, _START, _CHANNEL)  # of which each ends a message
THOUGHTS_END = (_END, _START, "assistant")
_HEADER_STARTS = (_START, _CHANNEL, _MESSAGE, "to=")
_BODY_END = re.compile("|".join(map(re.escape, BODY_ENDS)))
_FUNCTION = re.compile(r"to=functions\.([\w.-]{1,256})(?![\w.-])")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER = 512


def answer_header(calls: bool) -> list[str]:
    """What ends thoughts and begins the answer. One that may call tools is left the choice between words and a call."""
    rest = ("commentary",) if calls else ("final", _MESSAGE)
    return [*THOUGHTS_END, _CHANNEL, *rest]


class Inserted(str):
    """A part of the answer that the model did not write: stop strings are not looked for in it."""


class HarmonySplitter:
    def __init__(self, calls: bool) -> None:
        """The prompt ends with the beginning of a header. With `calls`, calls are handed on in the parser's form."""
        self._calls = calls
        self._text = ""
        self._in_header = True
        self._thinks = False
        self._ended = False
        self._parts = [False, False]  # whether thoughts and answer have text already
        self._begins = True  # the message has no text yet
        self._thoughts: list[str] = []
        self._answer: list[str] = []

    def push(self, text: str) -> tuple[str, list[str]]:
        self._text += text
        while self._read_header() if self._in_header else self._read_body():
            pass
        return self._take()

    def finish(self) -> tuple[str, list[str]]:
        self._ended = True
        while self._text and (self._read_header() if self._in_header else self._read_body()):
            pass
        return self._take()

    def _take(self) -> tuple[str, list[str]]:
        thoughts, answer = "".join(self._thoughts), self._answer
        self._thoughts, self._answer = [], []
        return thoughts, answer

    def _read_header(self) -> bool:
        """Whether there is more to read."""
        head = self._text[: _MAX_HEADER + len(_MESSAGE)]  # a header ends here, however much text there is already
        words = head.lstrip()
        is_header = any(words.startswith(start) or start.startswith(words) for start in _HEADER_STARTS)
        end = head.find(_MESSAGE)
        is_long = len(head) == _MAX_HEADER + len(_MESSAGE)
        is_cut = self._ended and words.startswith("<|")
        if not is_header or (end < 0 and (is_long or (self._ended and not is_cut))):
            for marker in (_START, _CHANNEL):  # as the beginning of a body it would begin the same header again
                if words.startswith(marker):
                    self._text = self._text.lstrip().removeprefix(marker)
            self._open_message("")  # a text without header is an answer
            return True
        if end < 0:
            if is_cut:
                self._text = ""
            return False
        header, self._text = self._text[:end], self._text[end + len(_MESSAGE) :]
        self._open_message(header)
        return True

    def _open_message(self, header: str) -> None:
        self._in_header, self._begins = False, True
        channel = _CHANNEL_NAME.search(header)
        function = _FUNCTION.search(header)
        self._thinks = channel is not None and channel[1] == "analysis" and function is None
        if function is not None and self._calls:
            self._add(Inserted(f"{CALL_START}{function[1]}{CALL_MESSAGE}"))

    def _read_body(self) -> bool:
        end = _BODY_END.search(self._text)
        if end is not None:
            self._add(self._text[: end.start()])
            self._text = self._text[end.end() if end.group() == _END else end.start() :]
            self._in_header = True
            return True
        kept = 0 if self._ended else _partial_size(self._text)
        self._add(self._text[: len(self._text) - kept])
        self._text = self._text[len(self._text) - kept :]
        return False

    def _add(self, text: str) -> None:
        if not text:
            return
        part = self._thoughts if self._thinks else self._answer
        if self._begins and self._parts[self._thinks]:  # messages of one kind stand on lines of their own
            part.append(Inserted("\n"))
        self._begins, self._parts[self._thinks] = False, True
        part.append(text)


def _partial_size(text: str) -> int:
    """How much of the end of a text may be the beginning of a marker."""
    sizes = range(min(len(text), len(_CHANNEL) - 1), 0, -1)
    return next((size for size in sizes if any(marker.startswith(text[-size:]) for marker in MARKERS)), 0)
