"""Who is next when there is more to do than threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from text_generation_inference.api.callers import caller_of, current_caller
from text_generation_inference.api.turns import Turns
from text_generation_inference.errors import OverloadedError


class Desk:
    """Work that ends when it is told to, in a thread."""

    def __init__(self, count: int, max_wait_s: float = 10) -> None:
        self.counts: list[int] = []
        self.turns = Turns(count, max_wait_s, self.counts.append)
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.threads = ThreadPoolExecutor(8)

    def ask(self, name: str, stop: Callable[[], None] | None = None) -> "asyncio.Task[str]":
        """The first letter is the caller."""
        gate = self.gates[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert gate.wait(10)
            return name

        async def run() -> str:
            current_caller.set(name[0])
            return await self.turns.run(self.threads, work, stop)

        return asyncio.create_task(run())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)

    async def end(self, name: str, count: int) -> None:
        """Let it end; so many have begun then."""
        self.gates[name].set()
        await self.until(lambda: len(self.begun) == count)


def test_callers_take_turns() -> None:
    async def run() -> None:
        desk = Desk(2)
        tasks = [desk.ask(f"a{number}") for number in range(5)]
        await desk.until(lambda: len(desk.begun) == 2)
        tasks += [desk.ask(name) for name in ("b0", "b1", "c0")]
        await asyncio.sleep(0.01)
        assert desk.turns.num_waiting == 6
        await desk.end("a0", 3)  # `b` has nothing at work
        await desk.end("a1", 4)  # nor has `c`; `b` has
        assert desk.begun[2:] == ["b0", "c0"]
        await desk.end(
            "b0", 5
        )  # nobody but `c` has something now, and `a` has waited longer than `b` since its last turn
        await desk.end("c0", 6)
        assert sorted(desk.begun[4:6]) == ["a2", "b1"]
        for gate in desk.gates.values():
            gate.set()
        assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "c0"]
        await desk.until(lambda: desk.turns._free == 2)
        assert desk.counts[-1] == 0
        assert not (desk.turns._at_work or desk.turns._waiting or desk.turns._last_turn), "kept of who is gone"

    asyncio.run(run())


def test_no_more_than_its_own_of_one_caller() -> None:
    async def run() -> None:
        turns = Turns(2, 10, most_each=1)
        await turns.take("a")
        waiting = asyncio.create_task(turns.take("a"))
        await asyncio.sleep(0)
        await asyncio.wait_for(turns.take("b"), 5)
        turns.give_back("b")
        await asyncio.sleep(0)
        assert not waiting.done()
        turns.give_back("a")
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


def test_waiting_too_long_is_overload() -> None:
    async def run() -> None:
        desk = Desk(1, 0.05)
        first = desk.ask("a0")
        with pytest.raises(OverloadedError):
            await desk.ask("b0")
        assert desk.turns.num_waiting == 0
        desk.gates["a0"].set()
        assert await first == "a0"
        desk.gates["a0"].set()
        second = desk.ask("b1")
        desk.gates["b1"].set()
        assert await second == "b1"
        assert desk.begun == ["a0", "b1"]

    asyncio.run(run())


def test_who_leaves_gives_up_its_place() -> None:
    async def run() -> None:
        desk, stopped = Desk(1), threading.Event()
        working, waiting, last = desk.ask("a0", stopped.set), desk.ask("a1", stopped.set), desk.ask("a2")
        await desk.until(lambda: desk.begun == ["a0"])
        waiting.cancel()
        await asyncio.wait([waiting])
        assert desk.turns.num_waiting == 1 and not stopped.is_set()
        working.cancel()
        await asyncio.wait([working])
        assert stopped.is_set()
        await asyncio.sleep(0.02)
        assert desk.begun == ["a0"], "the thread is not free before it is done"
        await desk.end("a0", 2)
        desk.gates["a2"].set()
        assert await last == "a2"

    asyncio.run(run())


def test_a_turn_that_comes_as_its_task_is_cancelled_goes_to_the_next() -> None:
    async def run() -> None:
        turns = Turns(1, 10)
        await turns.take("a")
        waiting = [asyncio.create_task(turns.take(name)) for name in "bc"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        turns.give_back("a")  # before the task has heard of it
        await asyncio.wait(waiting, timeout=5)
        assert waiting[0].cancelled() and waiting[1].done() and not waiting[1].cancelled()
        later = asyncio.create_task(turns.take("b"))
        await asyncio.sleep(0)
        turns.give_back("c")
        later.cancel()  # it has its turn, and does not know yet
        await asyncio.wait([later])
        await asyncio.wait_for(turns.take("d"), 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("client", "headers", "header", "caller"),
    [
        (("10.0.0.1", 5), {}, None, "10.0.0.1"),
        (("10.0.0.1", 5), {"x-forwarded-for": "1.2.3.4"}, None, "10.0.0.1"),
        (("10.0.0.1", 5), {"x-forwarded-for": "6.6.6.6, 1.2.3.4"}, "X-Forwarded-For", "1.2.3.4"),
        (("10.0.0.1", 5), {}, "X-Forwarded-For", "10.0.0.1"),
        (("::ffff:10.0.0.1", 5), {}, None, "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5), {}, None, "2001:db8:1:2::"),
        (("10.0.0.1", 5), {"x-user": "anna"}, "x-user", "anna"),
        (None, {}, None, ""),
    ],
)
def test_callers(client: Any, headers: dict[str, str], header: str | None, caller: str) -> None:
    assert caller_of({"client": client}, headers, header) == caller
