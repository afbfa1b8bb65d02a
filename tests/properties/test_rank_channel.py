"""The channel to ranks against an oracle: whatever pieces a stream comes in, every rank reads every order once, in
order; one that is left out, twice there or out of turn ends it."""

import socket
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from text_generation_inference.engine.rank_channel import (
    ForgetRequests,
    Link,
    OrderReader,
    PingRank,
    RankOrder,
    RunStep,
    encode,
)
from text_generation_inference.errors import EngineError
from text_generation_inference.types import Admission, Chunk, GenerationRequest, SamplingParams, StepPlan


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    slots = draw(st.lists(st.integers(0, 2**31), max_size=4))
    prompt = draw(st.lists(st.integers(0, 2**31), max_size=30))
    request = GenerationRequest(
        id=draw(st.integers(0, 2**63 - 1)),
        token_ids=prompt,
        sampling=SamplingParams(temperature=draw(st.floats(0.1, 10)), seed=draw(st.integers(0, 2**64 - 1))),
        max_new_tokens=3,
        stop_token_ids=[],
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    admit = [Admission(slot, request, [], [0, slot]) for slot in slots]
    chunks = [Chunk(slot, 0, len(prompt), draw(st.booleans())) for slot in slots]
    return StepPlan(draw(st.integers(0, 2**40)), slots, admit, [], slots, [(1, 0, slots)], draw(st.booleans()), chunks)


orders = st.lists(st.one_of(plans().map(RunStep), st.just(ForgetRequests()), st.just(PingRank())), max_size=6)


def frames_of(sent: list[tuple[int, RankOrder]]) -> bytes:
    """As `Link.send` writes them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours)
        for number, order in sent:
            link.send(number, encode(order))
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))


class Pieces(socket.socket):
    """A stream that hands out what it has in given pieces."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        super().__init__(socket.AF_UNIX)
        edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        self._pieces = [data[a:b] for a, b in pairwise(edges)]

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


def read_all(data: bytes, cuts: list[int]) -> list[tuple[int, RankOrder]]:
    with Pieces(data, cuts) as stream:
        reader = OrderReader(Link(stream))
        return list(iter(reader.receive, None))


@settings(max_examples=60, deadline=None)
@given(sent=orders, cuts=st.lists(st.integers(0, 2**20), max_size=12))
def test_every_order_once_and_in_order(sent: list[RankOrder], cuts: list[int]) -> None:
    numbered = list(enumerate(sent))
    assert read_all(frames_of(numbered), cuts) == numbered


@settings(max_examples=60, deadline=None)
@given(sent=orders.filter(lambda found: len(found) > 1), data=st.data())
def test_a_gap_ends_a_rank(sent: list[RankOrder], data: st.DataObject) -> None:
    numbered = list(enumerate(sent))
    place = data.draw(st.integers(0, len(sent) - 2))
    match data.draw(st.sampled_from(["lost", "twice", "swapped"])):
        case "lost":
            del numbered[place]
        case "twice":
            numbered.insert(place, numbered[place])
        case _:
            numbered[place], numbered[place + 1] = numbered[place + 1], numbered[place]
    with pytest.raises(EngineError, match="was due"):
        read_all(frames_of(numbered), [])


@settings(max_examples=30, deadline=None)
@given(sent=orders.filter(bool), lost=st.integers(1, 20))
def test_a_frame_without_its_end_is_no_order(sent: list[RankOrder], lost: int) -> None:
    """The other end is gone: what it had not sent whole is not done by halves."""
    numbered = list(enumerate(sent))
    data = frames_of(numbered)
    found = read_all(data[:-lost], [])
    assert found == numbered[: len(found)]
    assert len(found) < len(numbered)
