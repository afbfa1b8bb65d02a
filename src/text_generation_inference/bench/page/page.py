"""The whole page: who ran what where, then a section for each benchmark.

One file without anything from elsewhere: its policy lets a browser use this style and this script and fetch
nothing.
"""

import base64
import hashlib
from importlib import resources
from types import ModuleType
from typing import Any

import msgspec

from text_generation_inference.bench.page import frame, offline_section, serve_section, static_section
from text_generation_inference.bench.page.markup import Markup, join, tag
from text_generation_inference.bench.page.read import Run
from text_generation_inference.bench.page.tables import table
from text_generation_inference.bench.results import OfflineReport
from text_generation_inference.bench.serve.results import ServeReport
from text_generation_inference.bench.static.results import StaticReport
from text_generation_inference.version import __version__

_SECTIONS = (
    ("serving", "Serving", ServeReport, serve_section),
    ("offline", "Offline", OfflineReport, offline_section),
    ("static", "Static batches", StaticReport, static_section),
)
_KINDS = {"serve": "serving", "offline": "offline", "static": "static batches"}


def make_page(runs: list[Run], title: str | None = None) -> str:
    title = title or default_title(runs)
    sections: list[Markup] = []
    links: list[tuple[str, str]] = []
    for name, heading, kind, section in _SECTIONS:
        pairs: Any = [(run, run.report) for run in runs if isinstance(run.report, kind)]
        if pairs:
            sections.append(_section(name, heading, pairs, section))
            links.append((name, heading))
    links.append(("runs", "How each run was made"))
    style, script = _read("page.css"), _read("page.js")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style)),
    )
    nav = tag("nav", (tag("a", text, href=f"#{name}") for name, text in links), aria_label="Sections")
    cards = tag("div", (_card(run, len(runs)) for run in runs), class_="cards")
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("p", _subtitle(runs)), nav, _summary(runs)),
        tag("main", sections, tag("section", tag("h2", links[-1][1]), cards, id="runs")),
        tag("footer", tag("p", f"Made by tgi {__version__}. The formulas in full: docs/benchmarking.md.")),
        tag("div", id="tip", role="status", hidden=True),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


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


def _summary(runs: list[Run]) -> Markup:
    heads = ["Run", "Benchmark", "Hardware", "tgi", "Commit", "Started"]
    cells = [
        [
            run.name,
            _KINDS[run.report.benchmark] + ("" if run.report.complete else ", ended early"),
            _hardware(run.report.hardware),
            run.report.versions.get("tgi", "–"),
            run.report.commit or "–",
            run.report.started_at[:16].replace("T", " ") or "–",
        ]
        for run in runs
    ]
    return tag("div", table("Runs", heads, cells), class_="summary")


def _hardware(found: dict[str, Any]) -> str:
    """The part that decides; serving knows its client's machine only."""
    if "client" in found:
        return f"client: {found['client']}, {found.get('client_cpus', '?')} CPUs"
    named = found.get("gpu") or found.get("cpu") or found.get("device") or found.get("machine") or "–"
    return f"{named}, {found['cpus']} CPUs" if "cpus" in found and "gpu" not in found else str(named)


def _section(name: str, heading: str, pairs: Any, section: ModuleType) -> Markup:
    runs = [run for run, _ in pairs]
    groups: list[Markup] = []
    for title, charts in section.draw(pairs):
        drawn = [chart for chart in charts if chart is not None]
        if drawn:
            groups.append(tag("div", tag("h3", title) if title else None, tag("div", drawn, class_="charts")))
    legend = frame.legend([(run.slot, run.name) for run in runs]) if len(runs) > 1 and groups else None
    empty = None if groups else tag("p", "Nothing was measured.", class_="warning")
    tables = [part for run, report in pairs for part in section.list_tables(run, report)]
    told = (part for term, text in section.TERMS for part in (tag("dt", term), tag("dd", text)))
    return tag("section", tag("h2", heading), legend, empty, groups, tables, tag("dl", told, class_="terms"), id=name)


# -- a run ---------------------------------------------------------------------------------------------------------


def _card(run: Run, num_runs: int) -> Markup:
    report = run.report
    key = tag("svg", frame.mark(8.0, 8.0, run.slot), viewBox="0 0 16 16", class_="key", aria_hidden="true")
    facts = [
        ("Benchmark", _KINDS[report.benchmark]),
        ("Model", report.model),
        ("Started", report.started_at.replace("T", " ").replace("+00:00", " UTC") or "not said"),
        ("Hardware", _pairs(report.hardware)),
        ("Commit", report.commit or "not said"),
        ("Versions", _pairs(report.versions)),
        ("Configuration", _pairs(report.configuration)),
        *_more_facts(report),
        ("File", run.file),
    ]
    rows = [part for name, text in facts if text for part in (tag("dt", name), tag("dd", text))]
    early = None if report.complete else tag("p", "Ended early: what was measured until then.", class_="warning")
    return tag(
        "article",
        tag("h3", key if num_runs > 1 else None, run.name),
        early,
        tag("dl", rows),
        class_=f"card {frame.colour(run.slot)}",
    )


def _more_facts(report: Any) -> list[tuple[str, str]]:
    notes = Markup(tag("ul", (tag("li", note) for note in report.notes))) if getattr(report, "notes", None) else ""
    if isinstance(report, ServeReport):
        client = _pairs(
            {"url": report.url, "api": report.api, "profile": report.profile, "tokenizer": report.tokenizer}
        )
        return [("Requests", client), ("Server", _pairs(report.server)), ("Notes", notes)]
    if isinstance(report, OfflineReport):
        stages = _pairs({stage: f"{seconds:g} s" for stage, seconds in report.stages.items()})
        ready = "" if report.ready_seconds is None else join([f"after {report.ready_seconds:,.1f} s: ", stages])
        return [("Preset", report.preset or ""), ("Ready", ready), ("Notes", notes)]
    if isinstance(report, StaticReport):
        work = {
            "sequence length": report.sequence_length,
            "decode length": report.decode_length,
            "runs": report.runs,
            "warm-ups": report.warmups,
        }
        return [("Work", _pairs(work)), ("Notes", notes)]
    return []


def _pairs(fields: dict[str, Any]) -> Markup:
    pairs = (tag("span", tag("i", key), " ", tag("b", _plain(value)), class_="pair") for key, value in fields.items())
    return join(part for pair in pairs for part in (pair, " "))


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value):
        return ", ".join(_plain(part) for part in value)
    return msgspec.json.encode(value).decode()


# -- style and script ----------------------------------------------------------------------------------------------


def _read(name: str) -> str:
    return resources.files("text_generation_inference.bench.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
