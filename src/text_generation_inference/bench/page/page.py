"""The whole page, from its templates: who ran what where, then a section for each benchmark.

One file without anything from elsewhere: its policy lets a browser use this style and this script and fetch nothing.
What comes from a report is escaped by the templates, and characters that no page may contain are marked as unknown.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, cast

import jinja2
import msgspec

from text_generation_inference.bench.page import offline_section, serve_section, static_section
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.results import OfflineReport
from text_generation_inference.bench.serve.results import ServeReport
from text_generation_inference.bench.static.results import StaticReport
from text_generation_inference.bench.tables import Column, Table, make_table
from text_generation_inference.version import __version__

_SECTIONS = (
    ("serving", "Serving", ServeReport, serve_section),
    ("offline", "Offline", OfflineReport, offline_section),
    ("static", "Static batches", StaticReport, static_section),
)
_KINDS = {"serve": "serving", "offline": "offline", "static": "static batches"}
_PACKAGE = "text_generation_inference.bench.page"
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def make_page(runs: list[Run], title: str | None = None) -> str:
    style, script = _read("page.css"), _read("page.js")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title or default_title(runs),
            subtitle=_subtitle(runs),
            summary=make_table("Runs", _SUMMARY, runs),
            sections=_sections(runs),
            runs=runs,
            facts=_facts,
            policy=policy,
            style=style,
            script=script,
            version=__version__,
        )
    )


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
    )
    made.filters["plain"] = _plain
    cast(dict[str, Any], made.globals)["spans"] = _spans
    return made


def _finalize(value: Any) -> Any:
    """What is written for the value of an expression, before it is escaped."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")  # a place on a drawing
    return _FORBIDDEN.sub("\ufffd", value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        return ", ".join(_plain(part) for part in value)
    return msgspec.json.encode(value).decode()


def _spans(rows: Sequence[Sequence[str]], start: int, column: int) -> int:
    """How many rows from `start` on have the same names up to this column; 0 if the row before has them too."""
    names = rows[start][: column + 1]
    if start and rows[start - 1][: column + 1] == names:
        return 0
    end = start
    while end < len(rows) and rows[end][: column + 1] == names:
        end += 1
    return end - start


def _read(name: str) -> str:
    return resources.files(_PACKAGE).joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- what it says --------------------------------------------------------------------------------------------------


def default_title(runs: list[Run]) -> str:
    models = list(dict.fromkeys(run.report.model for run in runs))
    return f"Benchmark of {models[0]}" if len(models) == 1 else "Benchmarks"


def _subtitle(runs: list[Run]) -> str:
    dates = sorted({run.report.started_at[:10] for run in runs if run.report.started_at})
    when = "" if not dates else f" of {dates[0]}" if len(dates) == 1 else f" from {dates[0]} to {dates[-1]}"
    kinds = [
        f"{count} {_KINDS[kind]}" for kind in _KINDS if (count := sum(run.report.benchmark == kind for run in runs))
    ]
    if len(runs) == 1:
        return f"One run{when}: {_KINDS[runs[0].report.benchmark]}"
    return f"{len(runs)} runs{when}: {', '.join(kinds)}"


def _hardware(found: dict[str, Any]) -> str:
    """The part that decides; serving knows its client's machine only."""
    if "client" in found:
        return f"client: {found['client']}, {found.get('client_cpus', '?')} CPUs"
    named = found.get("gpu") or found.get("cpu") or found.get("device") or found.get("machine") or "–"
    return f"{named}, {found['cpus']} CPUs" if "cpus" in found and "gpu" not in found else str(named)


_SUMMARY = [
    Column("Run", lambda run: run.name),
    Column("Benchmark", lambda run: _KINDS[run.report.benchmark] + ("" if run.report.complete else ", ended early")),
    Column("Hardware", lambda run: _hardware(run.report.hardware)),
    Column("tgi", lambda run: run.report.versions.get("tgi")),
    Column("Commit", lambda run: run.report.commit or None),
    Column("Started", lambda run: run.report.started_at[:16].replace("T", " ") or None),
]


class Section(msgspec.Struct):
    """A benchmark. `parts` are tables, and warnings as plain text."""

    name: str
    heading: str
    runs: list[Run]
    groups: list[tuple[str | None, list[Any]]]  # headings and figures
    parts: list[Table | str]
    terms: dict[str, str]


def _sections(runs: list[Run]) -> list[Section]:
    found: list[Section] = []
    for name, heading, kind, module in _SECTIONS:
        pairs: Any = [(run, run.report) for run in runs if isinstance(run.report, kind)]
        if pairs:
            groups = [(title, [one for one in figures if one is not None]) for title, figures in module.draw(pairs)]
            parts = [part for run, report in pairs for part in module.list_tables(run.name, report)]
            shown = [(title, figures) for title, figures in groups if figures]
            found.append(Section(name, heading, [run for run, _ in pairs], shown, parts, module.TERMS))
    return found


def _facts(run: Run) -> dict[str, Any]:
    """How a run was made: texts, pairs of names and values, or lists."""
    report = run.report
    return {
        "Benchmark": _KINDS[report.benchmark],
        "Model": report.model,
        "Started": report.started_at.replace("T", " ").replace("+00:00", " UTC") or "not said",
        "Hardware": report.hardware,
        "Commit": report.commit or "not said",
        "Versions": report.versions,
        "Configuration": report.configuration,
        **_more_facts(report),
        "Notes": getattr(report, "notes", None),
        "File": run.file,
    }


def _more_facts(report: Any) -> dict[str, Any]:
    if isinstance(report, ServeReport):
        fields = ("url", "api", "profile", "tokenizer")
        return {"Requests": {field: getattr(report, field) for field in fields}, "Server": report.server}
    if isinstance(report, OfflineReport):
        ready = {} if report.ready_seconds is None else {"after": f"{report.ready_seconds:,.1f} s"}
        stages = {stage: f"{seconds:g} s" for stage, seconds in report.stages.items()}
        return {"Preset": report.preset or "", "Ready": {**ready, **stages} if ready else ""}
    fields = ("sequence_length", "decode_length", "runs", "warmups")
    return {"Work": {field.replace("_", " "): getattr(report, field) for field in fields}}
