"""How far a start is, told to people."""

import logging
import time

from text_generation_inference.progress import StageBars

log = logging.getLogger("text_generation_inference.launch")

_TELL_EVERY_S = 10.0


class StartStages:
    """Bars on a terminal, else a line when a stage begins and now and then after that."""

    def __init__(self, bars: bool) -> None:
        self._bars = StageBars() if bars else None
        self._told: dict[str, float] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        if self._bars is not None:
            self._bars.update(stage, done, total)
            return
        now = time.monotonic()
        if now - self._told.get(stage, -_TELL_EVERY_S) >= _TELL_EVERY_S:
            self._told[stage] = now
            log.info("%s%s", stage, f": {100 * done // total}%" if total and done else " ...")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.__exit__(None, None, None)
            self._bars = StageBars()  # for the next engine
