"""`Expression`: an expression of Python's `re` over names of matrices, matched with work that is counted.

A checkpoint's config.json has such expressions, and `re` takes forever for some (`(a*)*b`). Whether one matches needs
no captures, so all places of a name that a match can have reached are followed at once, as the bits of a number:
nothing is tried twice. What needs more than that (references to groups, atomic groups, flags) is refused.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache

MAX_LENGTH, MAX_DEPTH = 10_000, 50
_STEPS_FOR_ONE_NAME, _STEPS_IN_ALL = 20_000, 20_000_000  # expressions of real checkpoints take some 5 for a name
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_KINDS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": lambda character: character.isalnum() or character == "_",
}

Places = int  # bit i: a match may have come to the i-th character
Accepts = Callable[[str], bool]
Step = Callable[["_Name", Places], Places]


class PatternError(ValueError):
    """What is wrong with an expression, for the one who knows where it stands."""


class Work:
    """What all expressions of one config.json may take together."""

    def __init__(self) -> None:
        self.left = _STEPS_IN_ALL


class Expression:
    def __init__(self, text: str, work: Work) -> None:
        self._work = work
        if len(text) > MAX_LENGTH:
            raise PatternError(f"it has {len(text)} characters, {MAX_LENGTH} are allowed")
        self._step = _ExpressionReader(text).parse()
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"it is no pattern: {error}") from None

    def matches(self, name: str) -> bool:
        """Whether it matches from the start of a name, as `re.match` does."""
        return bool(self._step(_Name(name, self._work), 1))


class _Name:
    def __init__(self, text: str, work: Work) -> None:
        self.text = text
        self.every: Places = (2 << len(text)) - 1
        self._work = work
        self._left = _STEPS_FOR_ONE_NAME
        self._accepted: dict[Accepts, Places] = {}

    def spend(self) -> None:
        self._left -= 1
        self._work.left -= 1
        if self._left < 0 or self._work.left < 0:
            raise PatternError(f"matching it with {self.text!r} takes too much work")

    def accepted(self, accepts: Accepts) -> Places:
        """Those before a character that is accepted."""
        if accepts not in self._accepted:
            self._accepted[accepts] = sum(1 << place for place, each in enumerate(self.text) if accepts(each))
        return self._accepted[accepts]

    @property
    def ends(self) -> Places:
        """Those where `$` matches."""
        end = 1 << len(self.text)
        return end | end >> 1 if self.text.endswith("\n") else end

    @property
    def boundaries(self) -> Places:
        words = self.accepted(_KINDS["w"])
        return words ^ words << 1


# -- what expressions are made of --------------------------------------------------------------------------------------


def _literal(text: str) -> Step:
    def step(name: _Name, places: Places) -> Places:
        name.spend()
        found, place = 0, name.text.find(text)
        while place >= 0:
            found |= 1 << place
            place = name.text.find(text, place + 1)
        return (places & found) << len(text)

    return step


def _character(accepts: Accepts) -> Step:
    def step(name: _Name, places: Places) -> Places:
        name.spend()
        return (places & name.accepted(accepts)) << 1

    return step


def _run(accepts: Accepts) -> Step:
    """As many characters as there are, or fewer."""

    def step(name: _Name, places: Places) -> Places:
        name.spend()
        accepted = name.accepted(accepts)
        return ((places & accepted) + accepted ^ accepted) | places  # a carry runs through characters that follow

    return step


def _sequence(steps: list[Step]) -> Step:
    def step(name: _Name, places: Places) -> Places:
        for each in steps:
            places = each(name, places) if places else 0
        return places

    return steps[0] if len(steps) == 1 else step


def _either(steps: list[Step]) -> Step:
    def step(name: _Name, places: Places) -> Places:
        found = 0
        for each in steps:
            found |= each(name, places)
        return found

    return steps[0] if len(steps) == 1 else step


def _repeat(item: Step, least: int, most: int | None) -> Step:
    def step(name: _Name, places: Places) -> Places:
        name.spend()
        for _ in range(min(least, len(name.text) + 1)):  # after as many, only places that stay where they are are left
            places = item(name, places) if places else 0
        found, new, times = places, places, least
        while new and (most is None or times < most):
            new = item(name, new) & ~found
            found |= new
            times += 1
        return found

    return step


def _ahead(item: Step, wanted: bool) -> Step:
    def step(name: _Name, places: Places) -> Places:
        kept = 0
        for place in _bits(places):
            name.spend()
            kept |= place if bool(item(name, place)) is wanted else 0
        return kept

    return step


def _behind(item: Step, wanted: bool) -> Step:
    def step(name: _Name, places: Places) -> Places:
        name.spend()
        ends = item(name, name.every)
        return places & ends if wanted else places & ~ends

    return step


def _at(allowed: Callable[["_Name"], Places]) -> Step:
    def step(name: _Name, places: Places) -> Places:
        name.spend()
        return places & allowed(name)

    return step


_ANCHORS: dict[str, Callable[[_Name], Places]] = {
    "A": lambda name: 1,
    "Z": lambda name: 1 << len(name.text),
    "b": lambda name: name.boundaries,
    "B": lambda name: name.every & ~name.boundaries,
}
_LOOKS = {"?=": (_ahead, True), "?!": (_ahead, False), "?<=": (_behind, True), "?<!": (_behind, False)}
_GROUP = re.compile(r"\?:|\?P<\w+>|\?=|\?!|\?<=|\?<!|(?!\?)")
_TIMES = re.compile(r"\*|\+|\?|\{(?=[\d,])(?P<least>[0-9]*)(?P<comma>,)?(?P<most>[0-9]*)\}")


def _bits(places: Places) -> Iterator[Places]:
    while places:
        lowest = places & -places
        yield lowest
        places ^= lowest


def _is_any(character: str) -> bool:
    return character != "\n"


def _opposite(accepts: Accepts) -> Accepts:
    return lambda character: not accepts(character)


# -- from text ---------------------------------------------------------------------------------------------------------


class _ExpressionReader:
    """What it takes, it takes as `re` does. What is wrong in other ways `re` itself says afterwards."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> Step:
        step = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("it is no pattern: there is a ) too many")
        return step

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it is no pattern: it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> Step:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"it has more than {MAX_DEPTH} groups in each other")
        found = [self._branch()]
        while self._next() == "|":
            self._at += 1
            found.append(self._branch())
        self._depth -= 1
        return _either(found)

    def _branch(self) -> Step:
        steps: list[Step] = []
        literal = ""
        while self._next() not in ("", "|", ")"):
            item = self._item()
            times = self._times()
            if isinstance(item, str) and times is None:
                literal += item
                continue
            if literal:
                steps.append(_literal(literal))
                literal = ""
            steps.append(_repeated(item, times))
        if literal or not steps:
            steps.append(_literal(literal))
        return _sequence(steps)

    def _item(self) -> "str | Accepts | _Compound":
        """A character, those of a kind, or anything else."""
        character = self._take()
        if character == ".":
            return _is_any
        if character == "^":
            return _Compound(_at(_ANCHORS["A"]))
        if character == "$":
            return _Compound(_at(lambda name: name.ends))
        if character == "[":
            return self._set()
        if character == "(":
            return _Compound(self._group())
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise PatternError(f"it is no pattern: nothing is before {character}")
        return character

    def _escape(self) -> "str | Accepts | _Compound":
        character = self._take()
        if character in _ANCHORS:
            return _Compound(_at(_ANCHORS[character]))
        return self._escaped(character)

    def _escaped(self, character: str) -> str | Accepts:
        if character.lower() in _KINDS:
            accepts = _KINDS[character.lower()]
            return accepts if character.islower() else _opposite(accepts)
        if character in _ESCAPED:
            return _ESCAPED[character]
        if character.isascii() and character.isalnum():
            raise PatternError(f"\\{character} is not read in it")
        return character

    def _group(self) -> Step:
        opening = _GROUP.match(self._text, self._at)
        if opening is None:
            raise PatternError(f"({self._text[self._at : self._at + 3]} is not read in it")
        self._at = opening.end()
        step = self._alternatives()
        if self._take() != ")":
            raise PatternError("it is no pattern: a ( is not closed")
        if opening[0] in _LOOKS:
            look, wanted = _LOOKS[opening[0]]
            return look(step, wanted)
        return step

    def _set(self) -> Accepts:
        is_negated = self._next() == "^"
        self._at += is_negated
        members: list[Accepts] = []
        first = True
        while first or self._next() != "]":
            first = False
            low = self._member()
            if not isinstance(low, str) or self._next() != "-" or self._text[self._at + 1 : self._at + 2] == "]":
                members.append(low if not isinstance(low, str) else _between(low, low))
                continue
            self._at += 1
            high = self._member()
            if not isinstance(high, str):
                raise PatternError("it is no pattern: a range ends in a kind of characters")
            members.append(_between(low, high))
        self._at += 1

        def accepts(character: str) -> bool:
            return any(each(character) for each in members)

        return cache(_opposite(accepts) if is_negated else accepts)  # names have few kinds of characters

    def _member(self) -> str | Accepts:
        character = self._take()
        if character != "\\":
            return character
        escaped = self._take()
        return "\b" if escaped == "b" else self._escaped(escaped)

    def _times(self) -> tuple[int, int | None] | None:
        found = _TIMES.match(self._text, self._at)
        if found is None or found[0] == "{,":
            return None
        self._at = found.end()
        if self._next() == "?":  # as few as possible: the same places
            self._at += 1
        elif self._next() == "+":
            raise PatternError(f"{found[0]}+ is not read in it")
        if found[0] in "*+?":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
        if max(len(found["least"]), len(found["most"])) > len(str(MAX_LENGTH)):
            raise PatternError(f"{found[0]} is too much")
        least = int(found["least"] or 0)
        if found["comma"] is None:
            return least, least
        return least, int(found["most"]) if found["most"] else None


class _Compound:
    """A part that is more than one character."""

    def __init__(self, step: Step) -> None:
        self.step = step


def _repeated(item: "str | Accepts | _Compound", times: tuple[int, int | None] | None) -> Step:
    if isinstance(item, _Compound):
        return item.step if times is None else _repeat(item.step, *times)
    accepts = _between(item, item) if isinstance(item, str) else item
    if times is None:
        return _character(accepts)
    least, most = times
    if most is not None or least > 1:
        return _repeat(_character(accepts), least, most)
    return _sequence([*[_character(accepts)] * least, _run(accepts)])


def _between(low: str, high: str) -> Accepts:
    return lambda character: low <= character <= high
