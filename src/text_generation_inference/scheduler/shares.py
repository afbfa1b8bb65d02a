"""So many at a time, with some room that only callers with few of them may take.

Pure Python. Alone a caller may have everything. Once another one has been seen, served or not, a part of the
room is for callers that have no more than that part: whoever floods the server waits or is refused, the other does not.
Used for the requests that an api process admits, and for the slots of the engine.
"""

from collections import Counter, OrderedDict

_RESERVE = 16  # one part in so many
_REMEMBERED_NS = 60 * 10**9
_MOST_REMEMBERED = 1024  # callers


class Shares:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reserve = max(1, limit // _RESERVE)
        self._held: Counter[str] = Counter()
        self._seen: OrderedDict[str, int] = OrderedDict()  # when each caller last asked, oldest first
        self.num_held = 0

    def see(self, caller: str, now_ns: int) -> None:
        """A caller asks for something."""
        self._seen[caller] = now_ns
        self._seen.move_to_end(caller)
        while len(self._seen) > _MOST_REMEMBERED or next(iter(self._seen.values())) < now_ns - _REMEMBERED_NS:
            self._seen.popitem(last=False)

    def may_take(self, caller: str, count: int = 1) -> bool:
        """Whether there is room for so many of a caller."""
        room = self._limit - self.num_held
        if len(self._seen) > 1 and not self.is_small(caller, count):
            room -= self._reserve
        return count <= room

    def is_small(self, caller: str, count: int = 1) -> bool:
        """Whether the room kept for callers with few is for this one, too."""
        return self._held[caller] + count <= self._reserve

    def take(self, caller: str, count: int = 1) -> None:
        self.num_held += count
        self._held[caller] += count

    def give_back(self, caller: str, count: int = 1) -> None:
        self.num_held -= count
        self._held[caller] -= count
        if not self._held[caller]:
            del self._held[caller]
