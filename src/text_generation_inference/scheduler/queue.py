"""Who waits, and in which order they are let in.

Pure Python. Without a threshold: callers take turns, and the requests of one caller as they came, so that a
caller with a thousand requests delays another by one of them; a caller that may not run another one now is passed over.
With one (`QUEUE_THRESHOLD_MS`): shorter prompts first, whoever sent them, so that a long one does not hold up many
short ones; but whoever has waited longer than the threshold goes before all that have not, oldest first, so nobody
waits forever. A request that was preempted comes back to the head in either case: it has had its turn, and holds a
place.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import zip_longest

from text_generation_inference.scheduler.request import Request

MayRun = Callable[[str], bool]  # whether a caller may run another request now
_NS_PER_MS = 1_000_000
_MOST_GONE = 64  # entries of the heap whose request was taken as overdue


def make_queue(threshold_ms: int | None, clock: Callable[[], int]) -> "TakingTurns | ShorterFirst":
    return TakingTurns() if threshold_ms is None else ShorterFirst(threshold_ms, clock)


class TakingTurns:
    """A queue for each caller, and their heads one after the other."""

    def __init__(self) -> None:
        self._returned: deque[Request] = deque()  # preempted ones, head first
        self._by_caller: OrderedDict[str, deque[Request]] = OrderedDict()  # whose turn is next first
        self._num_waiting = 0  # without those returned

    def append(self, request: Request) -> None:
        self._by_caller.setdefault(request.source.caller, deque()).append(request)
        self._num_waiting += 1

    def appendleft(self, request: Request) -> None:
        self._returned.appendleft(request)

    def head(self, may_run: MayRun) -> Request | None:
        """Who is next; None if nobody may run now."""
        if self._returned:
            return self._returned[0]
        return next((waiting[0] for caller, waiting in self._by_caller.items() if may_run(caller)), None)

    def take(self, head: Request) -> None:
        """Remove the head that was looked at last."""
        if self._returned and self._returned[0] is head:
            self._returned.popleft()
            return
        caller = head.source.caller
        waiting = self._by_caller[caller]
        waiting.popleft()
        self._num_waiting -= 1
        if not waiting:
            del self._by_caller[caller]
        elif not head.finished:  # one that ended while it waited was no turn
            self._by_caller.move_to_end(caller)

    def drop_finished(self) -> None:
        """Requests that ended while they waited go."""
        self._returned = deque(request for request in self._returned if not request.finished)
        left = {
            caller: deque(request for request in waiting if not request.finished)
            for caller, waiting in self._by_caller.items()
        }
        self._by_caller = OrderedDict((caller, waiting) for caller, waiting in left.items() if waiting)
        self._num_waiting = sum(map(len, self._by_caller.values()))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        return len(self._returned) + self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """All, in the order in which they would be let in."""
        yield from self._returned
        for heads in zip_longest(*self._by_caller.values()):
            yield from (request for request in heads if request is not None)


class ShorterFirst:
    """A queue that orders by length until a request is overdue."""

    def __init__(self, threshold_ms: int, clock: Callable[[], int]) -> None:
        self._threshold_ns = threshold_ms * _NS_PER_MS
        self._now = clock
        self._returned: deque[Request] = deque()  # preempted ones, head first
        self._waiting: dict[Request, None] = {}  # the others, oldest first
        self._by_length: list[tuple[int, int, Request]] = []  # a heap; may hold ones that are gone
        self._head: Request | None = None  # as seen last

    def append(self, request: Request) -> None:
        self._waiting[request] = None
        heapq.heappush(self._by_length, (len(request.tokens), request.order, request))

    def appendleft(self, request: Request) -> None:
        self._returned.appendleft(request)
        self._head = None

    def head(self, may_run: MayRun) -> Request | None:
        """Who is next, whoever sent it; None if nobody waits."""
        self._head = self._find_head() if self else None
        return self._head

    def take(self, head: Request) -> None:
        """Remove the head that was looked at last: time may have made another one overdue since."""
        self._head = None
        if self._returned and self._returned[0] is head:
            self._returned.popleft()
        else:
            del self._waiting[head]
        if len(self._by_length) > 2 * len(self._waiting) + _MOST_GONE:
            self._by_length = [entry for entry in self._by_length if entry[2] in self._waiting]
            heapq.heapify(self._by_length)

    def drop_finished(self) -> None:
        """Requests that ended while they waited go."""
        self._returned = deque(request for request in self._returned if not request.finished)
        self._waiting = {request: None for request in self._waiting if not request.finished}
        self._by_length = [entry for entry in self._by_length if entry[2] in self._waiting]
        heapq.heapify(self._by_length)
        self._head = None

    def __bool__(self) -> bool:
        return bool(self._returned or self._waiting)

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """All, in the order in which they would be let in now."""
        yield from self._returned
        now = self._now()
        rest: list[Request] = []
        for request in self._waiting:
            if self._is_overdue(request, now):
                yield request
            else:
                rest.append(request)
        yield from sorted(rest, key=lambda request: (len(request.tokens), request.order))

    def _find_head(self) -> Request:
        if self._returned:
            return self._returned[0]
        oldest = next(iter(self._waiting))
        if self._is_overdue(oldest, self._now()):
            return oldest
        while self._by_length[0][2] not in self._waiting:
            heapq.heappop(self._by_length)
        return self._by_length[0][2]

    def _is_overdue(self, request: Request, now: int) -> bool:
        return now - request.arrived_ns > self._threshold_ns
