"""How the long steps of starting tell how far they are. Whoever starts the server renders it."""

from typing import Protocol


class Progress(Protocol):
    """Told how far a stage is, in bytes; `total` is 0 while it is not known."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""
