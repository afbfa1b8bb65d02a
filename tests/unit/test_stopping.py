"""`StopStrings` against a plain statement over the whole text, and `pick_best`."""

import math
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_inference.text.output import pick_best
from text_generation_inference.text.stopping import StopStrings

# Few letters, so that stop strings overlap each other and themselves.
letters = st.text("ab\n", max_size=30)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=4)


def split(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


def run(stopper: StopStrings, pieces: list[str]) -> tuple[list[str], bool]:
    out: list[str] = []
    for piece in pieces:
        text, stopped = stopper.push(piece)
        out.append(text)
        if stopped:
            return out, True
    out.append(stopper.flush())
    return out, False


def expected(text: str, stops: list[str], include_stop: bool) -> tuple[str, bool]:
    """The stop string that is complete first counts; of those that end there, the one that starts first."""
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not matches:
        return text, False
    end, start = min(matches)
    return text[: end if include_stop else start], True


@settings(max_examples=300, deadline=None)
@given(letters, stop_lists, st.booleans(), st.lists(st.integers(0, 100), max_size=12))
def test_any_splitting_gives_the_plain_result(text: str, stops: list[str], include_stop: bool, cuts: list[int]) -> None:
    out, stopped = run(StopStrings(stops, include_stop), split(text, cuts))
    assert ("".join(out), stopped) == expected(text, stops, include_stop)


@settings(max_examples=300, deadline=None)
@given(letters, stop_lists)
def test_nothing_given_out_is_ever_part_of_a_stop_string(text: str, stops: list[str]) -> None:
    """And nothing is held back that cannot become part of one."""
    stopper = StopStrings(stops, include_stop=False)
    given_out = ""
    for end in range(1, len(text) + 1):
        piece, stopped = stopper.push(text[end - 1])
        given_out += piece
        if stopped:
            break
        held = text[len(given_out) : end]
        assert given_out + held == text[:end]
        longest = max((n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])), default=0)
        assert len(held) == longest


@settings(max_examples=200, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=12))
def test_included_stop_holds_nothing_back(text: str, stops: list[str], cuts: list[int]) -> None:
    stopper = StopStrings(stops, include_stop=True)
    for piece in split(text, cuts):
        out, stopped = stopper.push(piece)
        assert piece.startswith(out)
        if stopped:
            break
        assert out == piece
    assert stopper.flush() == ""


@settings(max_examples=300, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=12))
def test_only_at_end(text: str, stops: list[str], cuts: list[int]) -> None:
    stopper = StopStrings(stops, include_stop=True, only_at_end=True)
    seen = ""
    for piece in split(text, cuts):
        out, stopped = stopper.push(piece)
        seen += piece
        assert out == piece
        assert stopped == any(seen.endswith(stop) or seen.endswith(stop + "\n") for stop in stops)
        if stopped:
            break
    assert stopper.flush() == ""


@pytest.mark.parametrize(
    ("pieces", "stops", "include", "out"),
    [
        (["Hello E", "ND tail"], ["END"], False, ["Hello ", ""]),
        (["Hello E", "ND tail"], ["END"], True, ["Hello E", "ND"]),
        (["Hello E", "cho"], ["END"], False, ["Hello ", "Echo", ""]),
        (["Hello EN"], ["END"], False, ["Hello ", "EN"]),
        (["xabcd"], ["abcd", "bc"], False, ["xa"]),
        (["xabc"], ["bc", "abc", "c"], False, ["x"]),
        (["ab", "cab", "d"], ["abcabd"], False, ["", "", ""]),
        (["ab", "cab", "cabd", "!"], ["abcabd"], False, ["", "", "abc"]),
        (["aa", "a", "b"], ["aab"], False, ["", "a", ""]),
        (["当", "前。", "x"], ["前。"], False, ["当", ""]),
        (["\n", "\nx"], ["\n\n"], False, ["", ""]),
    ],
)
def test_worked_examples(pieces: list[str], stops: list[str], include: bool, out: list[str]) -> None:
    assert run(StopStrings(stops, include), pieces)[0] == out


@pytest.mark.parametrize(
    ("pieces", "stops", "stopped"),
    [
        (["the E", "ND"], ["END"], True),
        (["the END", "."], ["END"], True),
        (["the END."], ["END"], False),
        (["the END\n"], ["END"], True),
        (["the END\n\n"], ["END"], False),
        (["the END. "], ["END."], False),
        (["x" * 500 + "a" * 250], ["a" * 250], True),
    ],
)
def test_worked_examples_only_at_end(pieces: list[str], stops: list[str], stopped: bool) -> None:
    assert run(StopStrings(stops, include_stop=True, only_at_end=True), pieces)[1] is stopped


def test_after_a_stop_nothing_comes() -> None:
    for stopper in (StopStrings(["b"], False), StopStrings(["b"], True), StopStrings(["b"], True, only_at_end=True)):
        assert not stopper.stopped
        stopper.push("ab")
        assert stopper.stopped
        assert stopper.push("more") == ("", True)
        assert stopper.flush() == ""


def test_flush_empties() -> None:
    stopper = StopStrings(["abc"], include_stop=False)
    assert stopper.push("xab") == ("x", False)
    assert stopper.flush() == "ab"
    assert stopper.flush() == ""


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""], include_stop=False)
    with pytest.raises(ValueError, match="only_at_end"):
        StopStrings(["a"], include_stop=False, only_at_end=True)


def test_cost_is_linear_for_the_worst_text() -> None:
    """A text that nearly matches everywhere must not be searched again at every character."""

    def seconds(stop_length: int) -> float:
        stopper = StopStrings(["a" * stop_length + "b"], include_stop=False)
        start = time.perf_counter()
        for _ in range(4000):
            stopper.push("a")
        return time.perf_counter() - start

    # Searching anew costs in proportion to the length of the stop string: 1000 times here.
    assert min(seconds(2000) for _ in range(3)) < 50 * min(seconds(2) for _ in range(3)) + 0.05


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=6))
def test_pick_best(means: list[float]) -> None:
    assert pick_best(means) == means.index(max(means))


def test_pick_best_prefers_numbers() -> None:
    assert pick_best([math.nan, -math.inf, -math.inf]) == 1
    assert pick_best([math.nan, math.nan]) == 0
    with pytest.raises(ValueError, match="nothing"):
        pick_best([])
