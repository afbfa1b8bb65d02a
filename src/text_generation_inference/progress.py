"""Progress on the terminal: a bar per start-up stage, a bar over prompts. Goes to standard error.

Without a terminal a stage that takes a while is told in one line when it starts.
"""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class _Bars:
    """A rich display that appears with its first bar."""

    _amount = "{task.percentage:>3.0f}%"

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._console = Console(file=sys.stderr)
        self._display: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """What is printed afterwards is below the bars."""
        if self._display is not None:
            self._display.stop()

    def _add(self, label: str, total: int) -> TaskID:
        if self._display is None:
            columns = (TextColumn("{task.description:<16}"), BarColumn(), TextColumn(self._amount))
            self._display = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            self._display.start()
        return self._display.add_task(label, total=total)


class StageBars(_Bars):
    """Receives `update(stage, done, total)` from whoever does the work."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._tasks: dict[str, TaskID] = {}
        self._told: set[str] = set()

    def update(self, stage: str, done: int, total: int) -> None:
        if not self._enabled:
            return
        if not self._console.is_terminal:
            if stage not in self._told:
                self._told.add(stage)
                print(f"{stage} ...", file=sys.stderr, flush=True)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._add(stage, total)
        assert self._display is not None
        self._display.update(self._tasks[stage], completed=done, total=total)


class CountBar(_Bars):
    """Counts finished items."""

    _amount = "{task.completed}/{task.total}"

    def __init__(self, label: str, total: int, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._label, self._total = label, total
        self._task: TaskID | None = None

    def update(self, done: int) -> None:
        if not (self._enabled and self._console.is_terminal):
            return
        if self._task is None:
            self._task = self._add(self._label, self._total)
        assert self._display is not None
        self._display.update(self._task, completed=done)
