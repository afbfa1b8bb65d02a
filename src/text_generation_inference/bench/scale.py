"""From values to places on a chart, and the round values that are marked on its axes.

Standard library only. Works for any finite numbers.
"""

import math
from collections.abc import Iterable, Sequence

_LOG_FROM = 40.0  # times larger: a linear axis would show the small values as one line
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


class Scale:
    """An axis from `start` to `end` (pixels). Everything outside its range is drawn at the nearest end."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high, value = self._line(self.low), self._line(self.high), self._line(value)
        share = 0.0 if high <= low else (value - low) / (high - low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))

    def _line(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log else value

    def ticks(self, most: int = 6) -> list[float]:
        return log_ticks(self.low, self.high, most) if self.log else linear_ticks(self.low, self.high, most)


def axis(values: Iterable[float], start: float, end: float, log: bool | None = None) -> Scale:
    """Holds all values: from zero, or by factors when they differ by large ones (`log` None)."""
    found = [value for value in values if math.isfinite(value)]
    positive = [value for value in found if value > 0]
    if log is None:
        log = len(positive) == len(found) > 0 and max(positive) > _LOG_FROM * min(positive)
    if log and positive:
        low, high = min(positive), max(positive)
        if high < 1.5 * low:
            low, high = low / 1.5, high * 1.5
        return Scale(low / 1.15, high * 1.15, start, end, log=True)
    low, high = min(0.0, *found, 0.0), max(0.0, *found, 0.0)
    if high <= low:
        high = low + 1.0
    step = tick_step(low, high, 5)
    return Scale(math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step, start, end)


def tick_step(low: float, high: float, most: int, steps: Sequence[float] = _STEPS) -> float:
    """The smallest round number that cuts the range into `most` parts or fewer. `steps` end with 10."""
    rough = max((high - low) / most, 1e-12)
    size = 10.0 ** math.floor(math.log10(rough))
    return next(step * size for step in steps if step * size >= rough * (1 - 1e-9) or step == steps[-1])


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    step = tick_step(low, high, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with values between them where there is room."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [part * 10.0**exponent for exponent in exponents for part in parts]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most:
            return inside
    every = -(-len(inside) // most)
    return inside[::every]


def thin(places: Sequence[float], least: float) -> list[int]:
    """Which of some places (rising) can have a label when labels are `least` pixels wide."""
    kept: list[int] = []
    for number, place in enumerate(places):
        if not kept or place - places[kept[-1]] >= least:
            kept.append(number)
    return kept


def short(value: float, digits: int = 4) -> str:
    """For an axis: 0.05, 1.5, 250, 1.5k, 20k, 3M."""
    size = abs(value)
    if size >= 1e12 or not math.isfinite(value):
        return f"{value:.0e}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * (1 - 0.5 * 10.0**-digits):
            return f"{value / limit:.{digits}g}{unit}"
    return f"{value:.{digits}g}" if size >= 1e-4 or not size else f"{value:.1e}"
