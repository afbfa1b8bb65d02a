"""So many at a time, and those who wait are served caller by caller.

Worker threads are shared out here: whoever has the fewest of them at work is next, then whoever had its last
turn longest ago, so that a caller with a hundred long texts delays another by one of them at most. Waiting too long
is overload, never a fault of what was asked. All calls come from one event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import TypeVar

from text_generation_inference.api.callers import current_caller
from text_generation_inference.errors import OverloadedError

T = TypeVar("T")


class Turns:
    """`count` at a time, `most_each` of one caller. Raises `OverloadedError` for who has waited `max_wait_s`."""

    def __init__(
        self,
        count: int,
        max_wait_s: float,
        on_change: Callable[[int], None] = lambda waiting: None,
        most_each: int | None = None,
    ) -> None:
        self._free = count
        self._most_each = most_each or count
        self._max_wait_s = max_wait_s
        self._on_change = on_change  # told how many wait
        self._at_work: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller
        self._turn = 0
        self._last_turn: dict[str, int] = {}  # of those who wait or have something at work

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def take(self, caller: str) -> None:
        """Wait for a turn. Who is cancelled has none."""
        if self._free and self._at_work[caller] < self._most_each:  # then nobody waits who could have it
            self._begin(caller)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._on_change(self.num_waiting)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self.give_back(caller)
            else:
                self._leave(caller, turn)
            if isinstance(error, TimeoutError):
                raise OverloadedError("too much work is waiting") from None
            raise

    def give_back(self, caller: str) -> None:
        self._at_work[caller] -= 1
        self._free += 1
        while self._free and self._waiting:
            following = min(self._waiting, key=lambda name: (self._at_work[name], self._last_turn.get(name, 0)))
            if self._at_work[following] >= self._most_each:
                break
            turns = self._waiting[following]
            turn = turns.popleft()
            if not turns:
                del self._waiting[following]
            if not turn.done():  # else it was cancelled, and its task has not heard of it yet
                self._begin(following)
                turn.set_result(None)
        self._forget(caller)
        self._on_change(self.num_waiting)

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """One for the caller of this request, for as long as the context lasts."""
        caller = current_caller.get()
        await self.take(caller)
        try:
            yield
        finally:
            self.give_back(caller)

    async def run(self, executor: Executor, work: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
        """Run something in a thread. The turn lasts until the thread is done, also if nobody waits for it any more.

        Who is cancelled has `stop` called, which may end the work.
        """
        caller = current_caller.get()
        await self.take(caller)
        loop = asyncio.get_running_loop()

        def end(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.give_back, caller)

        future = executor.submit(work)
        future.add_done_callback(end)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if stop is not None:
                stop()
            raise

    def _begin(self, caller: str) -> None:
        self._free -= 1
        self._at_work[caller] += 1
        self._turn += 1
        self._last_turn[caller] = self._turn

    def _leave(self, caller: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(caller)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[caller]
            self._forget(caller)
            self._on_change(self.num_waiting)

    def _forget(self, caller: str) -> None:
        """Nothing is kept of a caller that wants nothing."""
        if not self._at_work[caller]:
            del self._at_work[caller]
            if caller not in self._waiting:
                self._last_turn.pop(caller, None)
