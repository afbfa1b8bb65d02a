"""The parts of Prometheus' text: one series, and all series of a name.

Written here because prometheus_client would append `_total` to every counter. Which metrics there are is `metrics`'.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Generic, TypeVar

QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


# -- one series each -----------------------------------------------------------------------------------------------


class Scalar:
    """The value of a counter or a gauge."""

    __slots__ = ("_last_totals", "_recorded", "value")

    def __init__(self) -> None:
        self.value: float = 0
        self._recorded = False
        self._last_totals: dict[int, int] = {}  # by engine

    def add(self, amount: float = 1) -> None:
        self.value += amount
        self._recorded = True

    def set(self, value: float) -> None:
        self.value = value
        self._recorded = True

    def follow(self, total: int, replica: int = 0) -> None:
        """Grow with a total that an engine counts."""
        self.add(total - self._last_totals.get(replica, 0))
        self._last_totals[replica] = total

    def follow_from_zero(self, replica: int = 0) -> None:
        """That total starts again; this value does not."""
        self._last_totals[replica] = 0

    def lines(self, name: str, labels: str) -> Iterator[str]:
        if self._recorded:
            yield f"{name}{_braces(labels)} {_text(self.value)}"

    def numbers(self, name: str, labels: str) -> Iterator[tuple[str, float]]:
        """The same as numbers."""
        if self._recorded:
            yield f"{name}{_braces(labels)}", self.value


class Histogram:
    """How often values fell below each bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: list[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = sum(self._counts)
        if total == 0:
            return
        prefix = f"{name}_bucket{{{labels},le=" if labels else f"{name}_bucket{{le="
        for bound, count in zip(self._bounds, accumulate(self._counts), strict=False):
            yield f'{prefix}"{_text(bound)}"}} {count}'
        yield f'{prefix}"+Inf"}} {total}'
        yield f"{name}_sum{_braces(labels)} {_text(self._sum)}"
        yield f"{name}_count{_braces(labels)} {total}"

    def numbers(self, name: str, labels: str) -> Iterator[tuple[str, float]]:
        """Sum and count alone."""
        total = sum(self._counts)
        if total:
            yield f"{name}_sum{_braces(labels)}", self._sum
            yield f"{name}_count{_braces(labels)}", total

    @property
    def counts(self) -> list[int]:
        return self._counts


class Summary:
    """Quantiles of small whole numbers since the start, exact."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0]  # how often 0, 1, 2 ... were observed

    def observe(self, value: int, times: int = 1) -> None:
        while value >= len(self._counts):
            self._counts.append(0)
        self._counts[value] += times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        ranks = list(accumulate(self._counts))
        total = ranks[-1]
        if total == 0:
            return
        comma = "," if labels else ""
        for quantile in QUANTILES:
            value = bisect_left(ranks, max(quantile * total, 1))
            yield f'{name}{{{labels}{comma}quantile="{_text(quantile)}"}} {value}'
        yield f"{name}_sum{_braces(labels)} {sum(value * count for value, count in enumerate(self._counts))}"
        yield f"{name}_count{_braces(labels)} {total}"

    def numbers(self, name: str, labels: str) -> Iterator[tuple[str, float]]:
        """Sum and count alone."""
        total = sum(self._counts)
        if total:
            yield f"{name}_sum{_braces(labels)}", sum(value * count for value, count in enumerate(self._counts))
            yield f"{name}_count{_braces(labels)}", total


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def label(name: str, value: str) -> str:
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{value}"'


# -- all series of a name ------------------------------------------------------------------------------------------

Series = TypeVar("Series", Scalar, Histogram, Summary)


class Family(Generic[Series]):
    """A metric's name, type, HELP text and series by label value."""

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        self.name = name
        self._head = [f"# HELP {name} {help_text}"] if help_text else []
        self._head.append(f"# TYPE {name} {kind}")
        self._series: dict[str, Series] = {}

    def keep(self, series: Series, labels: str = "") -> Series:
        self._series[labels] = series
        return series

    def one(self: "Family[Scalar]", name: str, value: str) -> Scalar:
        """The number with this value of a label, which is there from its first use."""
        labels = label(name, value)
        return self._series.get(labels) or self.keep(Scalar(), labels)

    def labelled(self: "Family[Scalar]", **values: str) -> Scalar:
        """The same with several labels."""
        labels = ",".join(label(name, value) for name, value in values.items())
        return self._series.get(labels) or self.keep(Scalar(), labels)

    def lines(self) -> list[str]:
        body = [line for labels, series in self._series.items() for line in series.lines(self.name, labels)]
        return [*self._head, *body, ""] if body else []

    def numbers(self) -> Iterator[tuple[str, float]]:
        for labels, series in self._series.items():
            yield from series.numbers(self.name, labels)

    def counts(self: "Family[Histogram]") -> list[int]:
        """Of a histogram without labels."""
        return self._series[""].counts
