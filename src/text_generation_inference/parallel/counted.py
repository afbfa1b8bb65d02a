"""Collectives that are counted."""

from typing import Any, cast

from text_generation_inference.parallel.collectives import Collectives


class CountedCollectives:
    """Counts what this rank has begun: ranks that stopped after equally many are not in each other's way."""

    def __init__(self, inner: Collectives) -> None:
        self._inner: Any = inner
        self.num_begun = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def counted(*arguments: Any, **named: Any) -> Any:
            self.num_begun += 1
            return found(*arguments, **named)

        setattr(self, name, counted)  # the next call goes there at once
        return counted

    @property
    def face(self) -> Collectives:
        return cast(Collectives, self)
