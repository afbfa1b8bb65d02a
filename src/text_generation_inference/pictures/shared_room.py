"""How much may be under way in all, with a part that only callers with little of it may take.

Callers with more than a little fill three quarters at most, however many they are: who has little finds room beside
them. `pictures` knows no callers; whoever makes a loader says how to ask whose request the present task serves.
"""

from collections import Counter
from collections.abc import Callable

_KEPT = 4  # one part in so many is for callers with little
_LITTLE = 16  # which is one part in so many


class SharedRoom:
    """Of pictures or of bytes. All calls come from one event loop."""

    def __init__(self, limit: int, caller: Callable[[], str] | None = None) -> None:
        """Without `caller` all is one caller's, who may have all of it."""
        self.caller = caller or str
        self._limit = limit
        self._kept = limit // _KEPT if caller is not None else 0
        self._little = limit // _LITTLE
        self._held: Counter[str] = Counter()
        self.used = 0

    def try_take(self, caller: str, count: int) -> bool:
        has_little = self._held[caller] + count <= self._little
        if self.used + count > self._limit - (0 if has_little else self._kept):
            return False
        self._held[caller] += count
        self.used += count
        return True

    def give_back(self, caller: str, count: int) -> None:
        self._held[caller] -= count
        self.used -= count
        if not self._held[caller]:
            del self._held[caller]
