"""Both ends of the engine's socket under messages that mean nothing, through real sockets and a real engine."""

import asyncio
import os
import random
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from engine_process import Process, collect, connected, make

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine import client as client_module
from text_generation_inference.engine import outbox, wire
from text_generation_inference.engine.client import EngineClient, TokenEvent
from text_generation_inference.engine.loop import StepTimes
from text_generation_inference.engine.process import EngineServer, configure_socket
from text_generation_inference.errors import OverloadedError, RequestError, SlowClientError, ValidationError
from text_generation_inference.types import (
    Abort,
    Admitted,
    DeviceMemory,
    Finish,
    GenerationRequest,
    Grammar,
    Hello,
    ModelFacts,
    Profile,
    PromptLogprobs,
    Ready,
    SamplingParams,
    Submit,
    TokenOut,
    TopTokens,
)

PROMPT = [504, 3575, 282, 4649, 314]
FACTS = ModelFacts(
    model_id="m", dtype="float32", vocab_size=100, max_input_tokens=9, max_total_tokens=10, num_blocks=9, block_size=4,
    device="cpu",
)  # fmt: skip


def damaged(messages: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Random bytes, and valid messages that are cut short, have bits flipped or bytes put in."""
    rng = random.Random(seed)
    for number in range(count):
        data = bytearray(rng.choice(messages))
        match number % 4:
            case 0:
                data = bytearray(rng.randbytes(rng.randrange(200)))
            case 1:
                data = data[: rng.randrange(len(data))]
            case 2:
                for _ in range(rng.randrange(1, 9)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case _:
                place = rng.randrange(len(data))
                data[place:place] = rng.randbytes(rng.randrange(1, 30))
        yield bytes(data)


def request(number: int, **changes: Any) -> GenerationRequest:
    params = SamplingParams(temperature=0.7, top_p=0.9, logit_bias={5: 1.0}, stop=["x"], top_n_tokens=2)
    values: dict[str, Any] = {"token_ids": PROMPT, "sampling": params, "max_new_tokens": 2, "stop_token_ids": [2]}
    return GenerationRequest(id=number, seed=7, **{**values, **changes})


# -- the engine's end ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(model_cache: Path) -> Iterator[Process]:
    process = Process(model_cache, payload_limit=1000)
    process.wait_for_socket()
    yield process
    process.end()


@pytest.fixture
def stranger(engine: Process) -> Iterator["zmq.Socket[bytes]"]:
    """Someone who found the socket and has said hello."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 2000)
    dealer.connect(f"ipc://{engine.socket}")
    dealer.send(wire.encode(Hello(os.getpid())))
    yield dealer
    dealer.close()
    context.term()


def still_serves(engine: Process, expected: list[int]) -> None:
    async def run() -> None:
        client, _ = await connected(engine)
        try:
            assert (await collect(client, make(client, PROMPT, 6)))[0] == expected
        finally:
            await client.close()

    asyncio.run(run())
    assert engine.process.poll() is None


@pytest.fixture(scope="module")
def expected(engine: Process) -> list[int]:
    async def run() -> list[int]:
        client, _ = await connected(engine)
        tokens = (await collect(client, make(client, PROMPT, 6)))[0]
        await client.close()
        return tokens

    return asyncio.run(run())


def test_the_engine_survives_any_message(engine: Process, stranger: "zmq.Socket[bytes]", expected: list[int]) -> None:
    valid = [
        wire.encode(message)
        for message in (
            Hello(os.getpid()),
            Submit(request(1)),
            Submit(request(2, grammar=Grammar("regex", "[ab]+"))),
            Abort(1),
            Profile(3, False),
        )
    ]
    for data in damaged(valid, 600, seed=1):
        stranger.send(data)
    stranger.send_multipart([b"many", b"", b"frames"])
    stranger.send(b"")
    stranger.send(b"\x91" * 100_000)  # nested as deep as it is long
    still_serves(engine, expected)

    async def count() -> int:
        client, _ = await connected(engine)
        while client.load is None or client.load.num_malformed == 0:
            await asyncio.sleep(0.05)
        await client.close()
        return client.load.num_malformed

    assert asyncio.run(asyncio.wait_for(count(), 20)) >= 300


BAD_REQUESTS: list[dict[str, Any]] = [
    {"token_ids": [-1]},
    {"token_ids": [49152]},
    {"token_ids": []},
    {"stop_token_ids": [2**40]},
    {"max_new_tokens": 0},
    {"max_new_tokens": 2**40},
    {"sampling": SamplingParams(temperature=-1.0)},
    {"sampling": SamplingParams(temperature=float("nan"))},
    {"sampling": SamplingParams(top_n_tokens=10**9)},
    {"sampling": SamplingParams(top_k=2**40)},
    {"cache_salt": "s" * 1000},
    {"grammar": Grammar("no such kind", "x")},
]


@pytest.mark.parametrize("changes", BAD_REQUESTS, ids=lambda changes: str(changes)[:40])
def test_requests_that_no_api_process_makes_are_refused(engine: Process, changes: dict[str, Any]) -> None:
    async def run() -> None:
        client, _ = await connected(engine)
        _, reason, _ = await asyncio.wait_for(collect(client, request(client.next_id(), **changes)), 20)
        assert reason == "refused"
        await client.close()

    asyncio.run(run())


def test_too_large_a_message_ends_the_connection_that_sent_it_only(
    engine: Process, stranger: "zmq.Socket[bytes]", expected: list[int]
) -> None:
    stranger.send(b"\xc6" + bytes(wire.max_to_engine(1000)))
    raw = sockets.socket(sockets.AF_UNIX)
    raw.connect(str(engine.socket))
    raw.sendall(os.urandom(4096))  # not even ZeroMQ
    still_serves(engine, expected)
    raw.close()

    async def run() -> None:
        client = EngineClient(engine.socket, max_message_bytes=wire.max_to_engine(1000))
        await client.connect(60)
        with pytest.raises(ValidationError, match="too large"):
            client.submit(request(client.next_id(), grammar=Grammar("regex", "x" * wire.max_to_engine(1000))))
        await client.close()

    asyncio.run(run())


# -- an engine whose clients do not read ---------------------------------------------------------------------------


class Steps:
    """In the place of the engine's loop: each step brings every request a token with many best ones."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(
            num_running=0, num_waiting=0, stats=_ZEROS, pool=_ZEROS, count_tokens=lambda: (0, 0), picture_work=None
        )
        self.last = StepTimes()
        self.left: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, request: GenerationRequest) -> None:
        self.left[request.id] = request.max_new_tokens

    def abort(self, request_id: int) -> None:
        self.left.pop(request_id, None)

    def step(self) -> TokenOut:
        time.sleep(0.001)
        ids = list(self.left)
        counts = [self.left[number] for number in ids]
        tops = [TopTokens(row, list(range(500)), [-1.0] * 500) for row in range(len(ids))]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        done = [Finish(number, "length", None, 0, 0, 0) for number in ids if number not in self.left]
        return TokenOut(ids, counts, [-0.5] * len(ids), tops, [], done)


class _Zeros:
    def __getattr__(self, name: str) -> int:
        return 0


_ZEROS = _Zeros()


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    """Closed however a test ends: one that is left to the collector with an open socket never ends, and nor does pytest."""
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def finalizers(context: "zmq.Context[Any]") -> Iterator[ExitStack]:
    """What is done before sockets are closed, last first."""
    with ExitStack() as stack:
        yield stack


def test_a_client_that_does_not_read_ends_its_own_requests(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    context: "zmq.Context[Any]",
    finalizers: ExitStack,
) -> None:
    """The engine never waits for it, and what it was sent until then has no gap."""
    monkeypatch.setattr(outbox, "MAX_OUTBOX_BYTES", 2_000_000)
    monkeypatch.setattr(wire, "HIGH_WATER_MARK", 10)
    path = tmp_path_factory.mktemp("s") / "s.sock"
    router = context.socket(zmq.ROUTER)
    configure_socket(router, ServerConfig())
    router.setsockopt(zmq.LINGER, 0)
    router.bind(f"ipc://{path}")
    loop = Steps()
    facts = msgspec.structs.replace(FACTS, vocab_size=5000, max_total_tokens=10_000)
    device = SimpleNamespace(memory=lambda: DeviceMemory(0, 0))
    rank = SimpleNamespace(bucket_stats=None, take_news=list, check=lambda: None, device=device)
    engine: Any = SimpleNamespace(loop=loop, facts=facts, rank=rank, recorder=None)
    over = threading.Event()
    server = threading.Thread(target=EngineServer(engine, router).run, args=(over.is_set,), daemon=True)
    server.start()
    finalizers.callback(server.join, 10)
    finalizers.callback(over.set)
    unread = context.socket(zmq.DEALER)
    unread.setsockopt(zmq.RCVHWM, 10)
    unread.setsockopt(zmq.LINGER, 0)
    unread.connect(f"ipc://{path}")
    unread.send(wire.encode(Hello(os.getpid())))
    unread.send(wire.encode(Submit(request(1, max_new_tokens=5000))))

    async def other() -> list[int | None]:
        client = EngineClient(path)
        try:
            await client.connect(60)
            stream = client.submit(request(client.next_id(), max_new_tokens=300))
            events: list[TokenEvent] = []
            while not (events and events[-1].finish is not None):
                events += await stream.take()
        finally:
            await client.close()
        return [event.token_id for event in events]

    assert asyncio.run(asyncio.wait_for(other(), 60)) == list(range(300, 0, -1))
    end = time.monotonic() + 20
    while loop.left and time.monotonic() < end:
        time.sleep(0.01)
    assert not loop.left  # the request of the client that does not read is over, before its 5,000 tokens
    assert isinstance(wire.decode_from_engine(unread.recv()), Ready)
    seen: list[int] = []
    ended: list[Finish] = []
    while not ended:
        assert unread.poll(10_000)
        out = wire.decode_from_engine(unread.recv())
        if isinstance(out, TokenOut):
            seen += out.token_ids
            ended += out.finished
    assert seen == list(range(5000, 5000 - len(seen), -1)) and 10 < len(seen) < 5000
    assert (ended[0].reason, ended[0].error) == ("error", "the api process did not take the tokens in time")


# -- the api's end: an engine played by a socket -------------------------------------------------------------------


class Played:
    """Answers `Hello`; what else it sends is up to the test."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s.sock"
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(f"ipc://{self.path}")

    async def connect(self) -> tuple[EngineClient, bytes]:
        client = EngineClient(self.path)
        connecting = asyncio.create_task(client.connect(10))
        address, _ = await asyncio.to_thread(self.socket.recv_multipart)
        self.socket.send_multipart([address, wire.encode(Ready(FACTS))])
        await connecting
        return client, address

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    engine = Played(tmp_path_factory.mktemp("s"))
    yield engine
    engine.close()


def tokens(number: int, token: int, finish: bool = False, tops: int = 0) -> bytes:
    top = [TopTokens(0, list(range(tops)), [-1.0] * tops)] if tops else []
    finished = [Finish(number, "length", None, 0, 0, 0)] if finish else []
    return wire.encode(TokenOut([number], [token], [-0.5], top, [], finished))


def play(played: Played, test: Callable[[EngineClient, bytes], Any]) -> None:
    async def run() -> None:
        client, address = await played.connect()
        try:
            await asyncio.wait_for(test(client, address), 30)
        finally:
            await client.close()

    asyncio.run(run())


def test_several_tokens_of_a_request_in_one_message(played: Played) -> None:
    """Each is an event of its own, in order; what is before them comes with the first, the end with the last."""

    async def test(client: EngineClient, address: bytes) -> None:
        one, two, three = (client.submit(request(client.next_id())) for _ in range(3))
        ids = [one.request_id] * 3 + [two.request_id]
        plain = TokenOut(ids, [5, 6, 7, 8], [-0.5] * 4)
        finished = [Finish(stream.request_id, "length", None, 0, 0, 0) for stream in (one, three)]
        admitted = [Admitted(stream.request_id, 0, 1) for stream in (one, two)]
        prompts = [PromptLogprobs(one.request_id, 0, [-1.0])]
        more = TokenOut(ids, [1, 2, 3, 4], [-0.5] * 4, [TopTokens(1, [9], [-2.0])], prompts, finished, admitted)
        for out in (plain, more):
            await asyncio.to_thread(played.socket.send_multipart, [address, wire.encode(out)])
        events: list[TokenEvent] = []
        while not (events and events[-1].finish):
            events += await one.take()
        assert [event.token_id for event in events] == [5, 6, 7, 1, 2, 3]
        assert [bool(event.finish) for event in events] == [False] * 5 + [True]
        assert [event.admitted is not None for event in events] == [False] * 3 + [True, False, False]
        assert [bool(event.prompt_logprobs) for event in events] == [False] * 3 + [True, False, False]
        assert [event.top_tokens for event in events] == [[], [], [], [], [(9, -2.0)], []]
        assert [event.token_id for event in await two.take()] == [8, 4]
        (last,) = await three.take()
        assert last.token_id is None and last.finish is not None
        assert client.num_in_flight == 1

    play(played, test)


def test_the_client_survives_any_message(played: Played) -> None:
    """Messages that can be read but mean something else (tokens of requests that nobody has) change nothing either."""
    valid = [tokens(900_000, 5), tokens(900_001, 6, finish=True, tops=3), wire.encode(Ready(FACTS))]

    async def test(client: EngineClient, address: bytes) -> None:
        failures: list[Exception] = []
        client.on_failure = failures.append
        for data in damaged(valid, 600, seed=2):
            played.socket.send_multipart([address, data])
        stream = client.submit(request(client.next_id()))
        while client.num_malformed < 300:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        # What was lost may have held a token of it.
        with pytest.raises(RequestError, match="a message of the engine was lost"):
            await stream.take()
        assert client.num_in_flight == 0 and client.failure is None and not failures
        stream = client.submit(request(client.next_id()))
        played.socket.send_multipart([address, tokens(stream.request_id, 42, finish=True)])
        assert [event.token_id for event in await stream.take()] == [42]

    play(played, test)


def test_arrays_that_do_not_belong_together_are_malformed() -> None:
    for out in (
        TokenOut([1], [2, 3], [-0.5]),
        TokenOut([1], [2], []),
        TokenOut([1], [2], [-0.5], [TopTokens(1, [5], [-1.0])]),
        TokenOut([1], [2], [-0.5], [TopTokens(0, [5, 6], [-1.0])]),
    ):
        with pytest.raises(wire.MalformedMessageError):
            wire.decode_from_engine(wire.encode(out))


def test_a_request_that_nobody_reads_is_ended_and_nobody_else(played: Played) -> None:
    slow: list[int] = []

    async def test(client: EngineClient, address: bytes) -> None:
        client.on_slow_client = lambda: slow.append(1)
        unread, read = (client.submit(request(client.next_id())) for _ in range(2))
        count = client_module.MAX_STREAM_BYTES // 2000 + 1  # with their best tokens more than 2,000 bytes each
        seen = 0
        for sent in range(1, count + 1):
            played.socket.send_multipart([address, tokens(unread.request_id, 5, tops=13)])
            played.socket.send_multipart([address, tokens(read.request_id, 6)])
            while sent % 50 == 0 and seen < sent:
                seen += len(await read.take())
        while seen < count:
            seen += len(await read.take())
        assert slow == [1] and client.num_in_flight == 1
        assert client.num_held_bytes < 100_000
        with pytest.raises(SlowClientError):
            await unread.take()

    play(played, test)


def test_nothing_follows_the_end_of_a_request_that_nobody_reads(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the middle of a message with several of its tokens: those behind would come after a gap."""
    monkeypatch.setattr(client_module, "MAX_STREAM_BYTES", 1000)

    async def test(client: EngineClient, address: bytes) -> None:
        unread = client.submit(request(client.next_id()))
        number = unread.request_id
        out = TokenOut([number] * 8, list(range(8)), [-0.5] * 8, admitted=[Admitted(number, 0, 1)])
        await asyncio.to_thread(played.socket.send_multipart, [address, wire.encode(out)])
        while client.num_in_flight:
            await asyncio.sleep(0.01)
        with pytest.raises(SlowClientError):
            await unread.take()
        assert client.num_held_bytes == 0

    play(played, test)


def test_the_largest_pile_goes_first(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_HELD_BYTES", 500_000)

    async def test(client: EngineClient, address: bytes) -> None:
        large, small = (client.submit(request(client.next_id())) for _ in range(2))
        for number in range(400):
            played.socket.send_multipart([address, tokens(large.request_id, 5, tops=8)])
            if number % 4 == 0:
                played.socket.send_multipart([address, tokens(small.request_id, 6)])
        while client.num_in_flight == 2:
            await asyncio.sleep(0.01)
        with pytest.raises(SlowClientError):
            await large.take()
        assert len(await small.take()) > 10

    play(played, test)


def test_reading_leaves_the_loop_time_for_others(played: Played) -> None:
    """Thousands of messages that wait are not taken in one go."""

    async def test(client: EngineClient, address: bytes) -> None:
        stream = client.submit(request(client.next_id()))

        def send() -> None:
            for _ in range(3000):
                played.socket.send_multipart([address, tokens(stream.request_id, 5)])

        sending = threading.Thread(target=send)
        sending.start()
        sending.join(10)  # the loop stands still meanwhile: everything waits in the sockets
        most = turns = taken = 0
        while taken < client_module.wire.HIGH_WATER_MARK:
            before = len(stream._events)
            await asyncio.sleep(0)
            most = max(most, len(stream._events) - before)
            taken, turns = len(stream._events), turns + 1
        assert most <= 2 * client_module._MESSAGES_PER_TURN
        batch = await stream.take()
        assert len(batch) == client_module._EVENTS_PER_TAKE

    play(played, test)


def test_an_engine_that_takes_nothing_means_overload(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HIGH_WATER_MARK", 20)
    greeting = 1  # has one of these places until more than a few messages were taken

    async def test(client: EngineClient, address: bytes) -> None:
        large = request(1, stop_token_ids=list(range(50_000)))
        streams = []
        with suppress(OverloadedError):
            for _ in range(2000):
                streams.append(client.submit(msgspec.structs.replace(large, id=client.next_id())))
        assert 20 - greeting <= len(streams) < 2000
        for stream in streams:
            stream.abort()  # none of these may be lost
        aborted: set[int] = set()
        while len(aborted) < len(streams):
            _, payload = await asyncio.to_thread(played.socket.recv_multipart)
            message = wire.decode_to_engine(payload)
            if isinstance(message, Abort):
                aborted.add(message.request_id)
        assert aborted == {stream.request_id for stream in streams}

    play(played, test)
