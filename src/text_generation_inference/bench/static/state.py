"""How far the measurement is: what the screen and the lines of progress show.

Pure Python. Written by `run`, read by the displays.
"""

import time
from dataclasses import dataclass, field

from text_generation_inference.bench.static.results import BatchResult
from text_generation_inference.bench.static.task import StaticTask


@dataclass
class State:
    task: StaticTask
    about: str = ""  # device and precision
    batches: list[BatchResult] = field(default_factory=list)  # of all batch sizes
    current: int = 0  # index of the batch size at work
    rounds: int = 0  # of it that are done, warm-ups included
    finished: bool = False
    _round_seconds: dict[int, float] = field(default_factory=dict)  # mean of a round, by batch size
    _round_started: float = 0.0

    def __post_init__(self) -> None:
        self.batches = [BatchResult(batch_size=size) for size in self.task.batch_sizes]
        self._round_started = time.monotonic()

    @property
    def rounds_per_batch(self) -> int:
        return self.task.warmups + self.task.runs

    @property
    def warming_up(self) -> bool:
        return not self.finished and self.rounds < self.task.warmups

    @property
    def num_finished(self) -> int:
        """Batch sizes that are done."""
        return len(self.batches) if self.finished else self.current

    def start_batch(self, index: int) -> None:
        self.current, self.rounds = index, 0
        self._round_started = time.monotonic()

    def end_round(self) -> None:
        now = time.monotonic()
        size, seconds = self.batches[self.current].batch_size, now - self._round_started
        if self.rounds <= 1:  # the first is often slow: it counts only until there is a second
            self._round_seconds[size] = seconds
        else:
            self._round_seconds[size] += (seconds - self._round_seconds[size]) / self.rounds
        self.rounds += 1
        self._round_started = now

    def finish(self) -> None:
        self.finished = True

    # -- shares and time left, in rounds and seconds ---------------------------------------------------------------

    @property
    def batch_share(self) -> float:
        return 1.0 if self.finished else self.rounds / self.rounds_per_batch

    @property
    def total_share(self) -> float:
        return 1.0 if self.finished else (self.current + self.batch_share) / len(self.batches)

    def batch_seconds_left(self) -> float | None:
        """None as long as nothing is known."""
        if self.finished:
            return 0.0
        each = self._expect(self.batches[self.current].batch_size)
        if each is None:
            return None
        running = min(each, time.monotonic() - self._round_started)
        return (self.rounds_per_batch - self.rounds) * each - running

    def total_seconds_left(self) -> float | None:
        left = self.batch_seconds_left()
        if left is None or self.finished:
            return left
        for batch in self.batches[self.current + 1 :]:
            left += self.rounds_per_batch * (self._expect(batch.batch_size) or 0.0)
        return left

    def _expect(self, batch_size: int) -> float | None:
        """Seconds of a round: measured, else on the line through the two nearest batch sizes that were. As long as one
        is all there is, half of its time is taken to grow with the batch."""
        known = self._round_seconds
        if batch_size in known or not known:
            return known.get(batch_size)
        nearest = sorted(known, key=lambda size: abs(size - batch_size))[:2]
        if len(nearest) == 1:
            return known[nearest[0]] * (1 + batch_size / nearest[0]) / 2
        near, far = nearest
        slope = max(0.0, (known[near] - known[far]) / (near - far))
        return max(known[near] / 4, known[near] + slope * (batch_size - near))
