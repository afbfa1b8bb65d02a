"""Reports from files, of any benchmark, and what to call each of them on one page.

Reads nothing but its own format; a file that is something else is refused with its name.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from text_generation_inference.bench.results import BenchmarkReport, OfflineReport
from text_generation_inference.bench.serve.results import ServeReport
from text_generation_inference.bench.static.results import StaticReport
from text_generation_inference.errors import StartError

FORMAT = 1  # of the files; one that does not say is of this format
_KINDS: dict[str, type[BenchmarkReport]] = {"offline": OfflineReport, "serve": ServeReport, "static": StaticReport}


class Run(msgspec.Struct):
    """A report on the page. `slot` is its place among those of its benchmark, which chooses its colour."""

    slot: int
    name: str
    file: str
    report: BenchmarkReport


class _Head(msgspec.Struct):
    """What is looked at first, to say what is wrong in words that help."""

    benchmark: str
    format: int = FORMAT


def read_runs(files: Sequence[str]) -> list[Run]:
    """Raises `StartError` naming the first file that is no report."""
    reports = [read_report(file) for file in files]
    runs: list[Run] = []
    for file, name, report in zip(files, name_runs(files, reports), reports, strict=True):
        slot = sum(run.report.benchmark == report.benchmark for run in runs)
        runs.append(Run(slot, name, file, report))
    return runs


def read_report(file: str) -> BenchmarkReport:
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise StartError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartError(f"{file}: not a report of a benchmark: {_one_line(error)}") from None
    if head.format != FORMAT:
        raise StartError(f"{file}: written in format {head.format}, this version of tgi reads format {FORMAT}")
    kind = _KINDS.get(head.benchmark)
    if kind is None:
        raise StartError(f"{file}: benchmark {head.benchmark[:40]!r} is not one of {', '.join(_KINDS)}")
    try:
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        report = msgspec.convert({"started_at": "", **fields}, kind)  # older reports did not say when
        _check(report)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StartError(f"{file}: not a whole report of {head.benchmark}: {_one_line(error)}") from None
    return report


def _check(report: BenchmarkReport) -> None:
    """What types do not say."""
    if isinstance(report, ServeReport):
        for phase in report.phases:
            for histogram in (phase.ttft_histogram, phase.itl_histogram):
                if histogram is not None and len(histogram.edges) != len(histogram.counts) + 1:
                    raise ValueError(f"a histogram of phase {phase.name[:40]!r} needs one edge more than counts")


def name_runs(files: Sequence[str], reports: Sequence[BenchmarkReport]) -> list[str]:
    """The model's name; where several of a benchmark have the same, with the file's; then with a number."""
    kinds = [report.benchmark for report in reports]
    names = [short_model(report.model) for report in reports]
    names = _tell_apart(kinds, names, [Path(file).stem for file in files])
    return _tell_apart(kinds, names, [str(number) for number in range(1, len(files) + 1)])


def short_model(model: str) -> str:
    """The end of a path or of a hub name."""
    return model.rstrip("/").rpartition("/")[2] or model or "?"


def _tell_apart(kinds: list[str], names: list[str], more: list[str]) -> list[str]:
    both = list(zip(kinds, names, strict=True))
    often = Counter(both)
    return [f"{pair[1]} · {extra}" if often[pair] > 1 else pair[1] for pair, extra in zip(both, more, strict=True)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
