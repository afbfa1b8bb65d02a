"""What was compiled."""

from contextlib import contextmanager

from habana_frameworks.torch._bridge_ops import fall_backs
from habana_frameworks.torch._emulation import books

_NAMES = ("graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache")


class Metric:
    def __init__(self, name: str, start: int = 0) -> None:
        self._name, self._start, self._end = name, start, None

    def name(self) -> str:
        return self._name

    def stats(self) -> list[tuple[str, int | float | str]]:
        end = books.compilations if self._end is None else self._end
        if self._name == "graph_compilation":
            return [("TotalNumber", end - self._start), ("TotalTime", 0), ("AvgTime", 0)]
        if self._name == "cpu_fallback":  # since the process began
            found = fall_backs()
            return [("TotalNumber", sum(found.values())), ("FallbackOps", str(found) if found else "")]
        return [("TotalNumber", 0)]

    def reset(self) -> None:
        self._start = books.compilations

    def stop(self) -> None:
        self._end = books.compilations


_metrics = {name: Metric(name) for name in _NAMES}


def metric_global(name: str) -> Metric | None:
    return _metrics.get(name)


@contextmanager
def metric_localcontext(name: str):
    if name not in _NAMES:
        raise KeyError(f"Metric with given name ({name}) doesn't exist.")
    metric = Metric(name, books.compilations)
    try:
        yield metric
    finally:
        metric.stop()
