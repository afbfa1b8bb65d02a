"""Who waits, and in which order they are let in.

Level 1, pure Python. Without a threshold: as they came, which a deque does by itself. With one (`QUEUE_THRESHOLD_MS`):
shorter prompts first, so that a long one does not hold up many short ones; but whoever has waited longer than the
threshold goes before all that have not, oldest first, so nobody waits forever. A request that was preempted comes back
to the head in either case: it has had its turn, and holds a place.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from tgi.scheduler.request import Request

_NS_PER_MS = 1_000_000
_MOST_GONE = 64  # entries of the heap whose request was taken as overdue


def make_queue(threshold_ms: int | None, clock: Callable[[], int]) -> "AsTheyCame | ShorterFirst":
    return AsTheyCame() if threshold_ms is None else ShorterFirst(threshold_ms, clock)


class AsTheyCame(deque[Request]):
    def drop_finished(self) -> None:
        """Requests that ended while they waited go."""
        left = [request for request in self if not request.finished]
        self.clear()
        self.extend(left)


class ShorterFirst:
    """A queue that orders by length until a request is overdue. The calls are those of a deque."""

    def __init__(self, threshold_ms: int, clock: Callable[[], int]) -> None:
        self._threshold_ns = threshold_ms * _NS_PER_MS
        self._now = clock
        self._returned: deque[Request] = deque()  # preempted ones, head first
        self._waiting: dict[Request, None] = {}  # the others, oldest first
        self._by_length: list[tuple[int, int, Request]] = []  # a heap; may hold ones that are gone
        self._head: Request | None = None  # as seen last, so that `popleft` takes the same

    def append(self, request: Request) -> None:
        self._waiting[request] = None
        heapq.heappush(self._by_length, (len(request.tokens), request.order, request))

    def appendleft(self, request: Request) -> None:
        self._returned.appendleft(request)
        self._head = None

    def __getitem__(self, place: int) -> Request:
        """The head; no other place can be asked for."""
        assert place == 0
        self._head = self._find_head()
        return self._head

    def popleft(self) -> Request:
        """Take the head that was looked at last: time may have made another one overdue since."""
        head = self._find_head() if self._head is None else self._head
        self._head = None
        if self._returned and self._returned[0] is head:
            self._returned.popleft()
        else:
            del self._waiting[head]
        if len(self._by_length) > 2 * len(self._waiting) + _MOST_GONE:
            self._by_length = [entry for entry in self._by_length if entry[2] in self._waiting]
            heapq.heapify(self._by_length)
        return head

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
