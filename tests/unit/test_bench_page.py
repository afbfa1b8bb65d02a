"""The page of `tgi bench report`: its figures are those of the files, and nothing in a file becomes part of the page."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench_samples import make_phase, offline_report, serve_report, static_report, users_report
from text_generation_inference.bench.command import main
from text_generation_inference.bench.page.page import make_page
from text_generation_inference.bench.page.read import name_runs, read_runs
from text_generation_inference.bench.report import write_report
from text_generation_inference.bench.results import BenchmarkReport, Spread
from text_generation_inference.bench.scale import Scale, axis, linear_ticks, log_ticks, short
from text_generation_inference.bench.serve.results import LatencyHistogram
from text_generation_inference.bench.static.results import BatchResult, summarise


class Seen(HTMLParser):
    """Every tag with its attributes, and the tables by their captions."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: list[str] = []
        self._open: list[str] = []
        self._cells: list[list[str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self.attributes += [(name, key, value) for key, value in attrs]
        if name not in ("meta", "link", "br"):
            self._open.append(name)
        if name == "table":
            self._cells = []
        if name == "tr":
            self._cells.append([])
        if name in ("td", "th"):
            self._cells[-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name, f"{name} closed out of order"
        if name == "table":
            self.tables[self._caption] = self._cells

    def handle_data(self, data: str) -> None:
        where = self._open[-1] if self._open else ""
        if self._open[-2:] == ["caption", "span"]:
            self._caption = data
        if where in ("td", "th"):
            self._cells[-1][-1] += data
        if where not in ("script", "style", "") and data.strip():
            self.texts.append(data)

    def done(self) -> bool:
        return not self._open


def page_of(tmp_path: Path, *reports: BenchmarkReport, title: str | None = None) -> str:
    files = []
    for number, report in enumerate(reports):
        file = tmp_path / f"report-{number}.json"
        write_report(report, str(file))
        files.append(str(file))
    return make_page(read_runs(files), title)


def value_of(cell: str) -> float:
    return float(re.sub(r"[,%]| \(.*\)", "", cell))


def equal(cell: str, value: float) -> bool:
    """A cell shows a value as far as its digits go."""
    digits = len(cell.partition(".")[2].rstrip("%"))
    return value_of(cell) == pytest.approx(value, abs=0.5001 * 10**-digits)


# -- figures -------------------------------------------------------------------------------------------------------


def test_serving_figures(tmp_path: Path) -> None:
    report = serve_report()
    tables = Seen(page_of(tmp_path, report)).tables
    heads, *rows = tables["Llama-3.1-8B: results"]
    assert heads[0] == "Benchmark" and len(rows) == len(report.phases) == 10
    for phase, row in zip(report.phases, rows, strict=True):
        assert phase.e2e and phase.ttft and phase.itl and phase.tpot
        assert row[0] == phase.name
        figures = [phase.qps, phase.e2e.average / 1e3, phase.ttft.average, phase.itl.average, phase.output_tokens_per_s]
        assert all(equal(cell, value) for cell, value in zip(row[1:6], figures, strict=True))
        assert equal(row[6], 100 * phase.error_rate)
        assert row[7] == f"{phase.num_successful}/{phase.num_successful + phase.num_failed}"
        assert equal(row[8], phase.prompt_tokens) and equal(row[9], phase.decoded_tokens)
    heads, *rows = tables["Llama-3.1-8B: latency, ms"]
    assert [row[-7] for row in rows] == ["TTFT", "ITL", "TPOT", "E2E"] * 10
    spreads = [spread for phase in report.phases for spread in (phase.ttft, phase.itl, phase.tpot, phase.e2e)]
    for spread, row in zip(spreads, rows, strict=True):
        for name, cell in zip(heads[2:], row[-6:], strict=True):
            assert equal(cell, getattr(spread, name))
    heads, *rows = tables["Llama-3.1-8B: requests within TTFT 400 ms, ITL 30 ms"]
    goods = [phase.goodput for phase in report.phases]
    for good, row in zip(goods, rows, strict=True):
        assert (
            good and equal(row[1], good.per_s) and equal(row[2], 100 * good.share) and equal(row[3], good.num_requests)
        )
    assert tables["Llama-3.1-8B: errors"][1] == ["constant@4.39req/s", "HTTP 429: Model is overloaded", "6"]


def test_offline_figures(tmp_path: Path) -> None:
    report = offline_report()
    tables = Seen(page_of(tmp_path, report)).tables
    heads, *rows = tables["llama-2-7b: throughput"]
    assert heads[2] == "published: Llama-2-7B FP8 on Gaudi 2"
    for result, row in zip(report.rows, rows, strict=True):
        assert result.published
        assert row[0] == f"{result.inputs}/{result.outputs} x{result.requests}"
        assert equal(row[1], result.output_tokens_per_s)
        assert row[2] == f"{result.published.output_tokens_per_s:,.0f} (1 card)"
        assert equal(row[3], result.floor_tokens_per_s or 0) and equal(row[4], 100 * (result.of_floor or 0))
        assert equal(row[5], result.total_tokens_per_s) and row[6] == "5" and equal(row[7], result.seconds)
    heads, *rows = tables["llama-2-7b: steps, first tokens and memory"]
    names = ["step_ms", "floor_step_ms", "host_ms", "first_token_ms", "first_token_max_ms", "num_steps"]
    for result, row in zip(report.rows, rows, strict=True):
        assert all(equal(cell, getattr(result, name)) for name, cell in zip(names, row[1:7], strict=True))
    bare = offline_report(floor=False, published=False, profiles=[], skipped=[])
    tables = Seen(page_of(tmp_path, bare)).tables
    assert tables["llama-2-7b: throughput"][0] == [
        "in/out x requests",
        "output tok/s",
        "total tok/s",
        "iterations",
        "seconds",
    ]


def test_static_figures(tmp_path: Path) -> None:
    report = static_report()
    tables = Seen(page_of(tmp_path, report)).tables
    heads, *rows = tables["SmolLM2-135M-Instruct: latency"]
    lists = [batch.prefill_ms for batch in report.batches]
    lists += [batch.decode_token_ms for batch in report.batches] + [batch.decode_total_ms for batch in report.batches]
    for values, row in zip(lists, rows, strict=True):
        summary = summarise(values)
        for name, cell in zip(heads[2:], row[-6:], strict=True):
            assert equal(cell, getattr(summary, name.removesuffix(", ms").lower()))
    assert [row[-7] for row in rows] == ["1", "2", "4", "8", "16", "32"] * 3
    _, *rows = tables["SmolLM2-135M-Instruct: throughput"]
    lists = [batch.prefill_tokens_per_s for batch in report.batches]
    lists += [batch.decode_tokens_per_s for batch in report.batches]
    assert all(equal(row[-3], sum(values) / len(values)) for values, row in zip(lists, rows, strict=True))


def test_marks_are_where_their_values_are(tmp_path: Path) -> None:
    """Through the labels of the axis: the place of a mark says its value."""
    report = static_report()
    page = page_of(tmp_path, report)
    figure = next(part for part in page.split("<figure>") if "<b>Decode throughput</b>" in part)
    labels = re.findall(r'<text x="38" y="([\d.]+)" class="tick right">([\d,.]+)</text>', figure)
    ticks = [(float(y) - 4, value_of(text)) for y, text in labels]
    (y0, low), (y1, high) = ticks[0], ticks[-1]
    places = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)" r="3.6" class="mark"', figure)]
    found = [low + (y - y0) / (y1 - y0) * (high - low) for y in places]
    expected = [summarise(batch.decode_tokens_per_s).average for batch in report.batches]
    assert found == pytest.approx(expected, abs=(high - low) / 150)


def test_bars_are_as_long_as_their_values(tmp_path: Path) -> None:
    report = offline_report()
    page = page_of(tmp_path, report)
    figure = next(part for part in page.split("<figure>") if "<b>Throughput</b>" in part)
    lengths = [float(width) for width in re.findall(r'width="([\d.]+)" height="15" class="bar"', figure)]
    floors = [float(x) - 2 for x in re.findall(r'<line x1="([\d.]+)"[^>]*class="floor"', figure)]
    unit = floors[0] / (report.rows[0].floor_tokens_per_s or 0)
    assert lengths == pytest.approx([row.output_tokens_per_s * unit for row in report.rows], abs=0.02)
    assert floors == pytest.approx([(row.floor_tokens_per_s or 0) * unit for row in report.rows], abs=0.02)


def test_several_runs_share_charts(tmp_path: Path) -> None:
    page = page_of(tmp_path, serve_report(), serve_report(1.3, 2), users_report(), static_report(), offline_report(0.9))
    assert page.count('class="legend"') == 1  # only serving has more than one run
    names = [f"Llama-3.1-8B · report-{number}" for number in range(3)]
    seen = Seen(page)
    assert seen.done() and all(f"{name}: results" in seen.tables for name in names)
    figure = next(part for part in page.split("<figure>") if "<b>Time to first token</b>" in part)
    assert re.findall(r'<g class="run (s\d)"', figure) == ["s3", "s2", "s1"]
    assert all(name in figure for name in names)
    figure = next(part for part in page.split("<figure>") if "requests/s asked for" in part)
    assert "<b>Throughput</b>" in figure
    assert all(name in figure for name in names)  # the closed loop too, which no rate was asked of
    assert "users at a time" in page and "share of values up to a time" in page


def test_what_ended_early_is_said(tmp_path: Path) -> None:
    page = page_of(tmp_path, offline_report(complete=False))
    assert "Ended early" in page and "offline, ended early" in page
    assert "left out. 128/2048 x750: needs a KV cache of 1,632,000 tokens" in page


def test_details_of_a_run_are_there(tmp_path: Path) -> None:
    texts = Seen(page_of(tmp_path, serve_report())).texts
    for text in ("meta-llama/Llama-3.1-8B", "NVIDIA H200", "571d9b644fdc", "2.11.0", "sweep", "fixed-length", "4096"):
        assert text in texts
    assert "2026-11-15 11:40:12 UTC" in texts


# -- files that mean harm, or are broken ---------------------------------------------------------------------------

HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)> ' onload='x",
    "</style></title></svg><!-- -->]]>&lt;b&gt;",
    "\x00\x1b[31m\u202e{{7*7}} \ud7ff\uffff",
    "a" * 3000,
]


def replace_strings(value: Any, text: str, keep: tuple[str, ...] = ()) -> Any:
    """All strings of a report, keys of free-form dicts too."""
    if isinstance(value, str):
        return text
    if isinstance(value, list):
        return [replace_strings(one, text) for one in value]
    if isinstance(value, dict):
        return {key: one if key in keep else replace_strings(one, text) for key, one in value.items()}
    return value


@pytest.mark.parametrize("make", [serve_report, offline_report, static_report])
@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(tmp_path: Path, make: Callable[[], BenchmarkReport], text: str) -> None:
    """The page has the same elements and attributes, whatever the texts of the file are."""
    pages = []
    for number, each in enumerate(["harmless", text]):
        fields = replace_strings(msgspec.to_builtins(make()), each, keep=("benchmark", "mode"))
        fields["configuration"] = {each: {each: [each, 1]}}
        fields["versions"] = {each: each}
        for phase in fields.get("phases", []):
            phase["errors"] = {each: 3}
            phase["goodput"]["limits_ms"] = {each: 1.0}
        for profile in fields.get("profiles", []):
            profile["by_kind"] = {each: 1.0, "products": 2.0}
        file = tmp_path / f"{number}.json"
        file.write_bytes(msgspec.json.encode(fields))
        pages.append(Seen(make_page(read_runs([str(file)]), each)))
    harmless, hostile = pages
    assert hostile.done() and hostile.tags == harmless.tags
    assert [(name, key) for name, key, _ in hostile.attributes] == [(name, key) for name, key, _ in harmless.attributes]
    assert not any(key.startswith("on") for _, key, _ in hostile.attributes)
    assert hostile.texts[0] == escape_once(text)


def escape_once(text: str) -> str:
    """What a reader of the page sees of a text."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\uffff]", "\ufffd", text)


def test_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(tmp_path, serve_report(), offline_report(), static_report())
    seen = Seen(page)
    links = [value or "" for _, key, value in seen.attributes if key in ("src", "href", "action", "srcset", "data")]
    assert links and all(value.startswith(("#", "data:,")) for value in links)
    assert not any(key == "style" for _, key, _ in seen.attributes)
    assert "@import" not in page and "url(" not in page
    policy = next(value for _, key, value in seen.attributes if key == "content" and "default-src" in (value or ""))
    assert policy and policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_characters_that_no_page_may_contain(tmp_path: Path) -> None:
    page = page_of(tmp_path, static_report(), title="a\x00b\ud800\x9fc\td<&>\"'")
    assert "<h1>a\ufffdb\ufffd\ufffdc\td&lt;&amp;&gt;&#34;&#39;</h1>" in page


BROKEN = {
    "empty": (b"", "not a report"),
    "text": (b"hello", "not a report"),
    "half": (b'{"benchmark": "offline", "rows": [', "not a report"),
    "latin": (b'{"benchmark": "\xff"}', "not a report"),
    "surrogate": (b'{"benchmark": "\\ud800"}', "not a report"),
    "list": (b"[]", "not a report"),
    "other": (b'{"ours": {}}', "missing required field `benchmark`"),
    "number": (b'{"benchmark": 3}', "not a report"),
    "unknown": (b'{"benchmark": "online"}', "'online' is not one of offline, serve, static"),
    "later": (b'{"benchmark": "serve", "format": 2}', "format 2, this version of tgi reads format 1"),
    "bare": (b'{"benchmark": "static"}', "missing required field"),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_files_are_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, words = BROKEN[name]
    file = tmp_path / f"{name}.json"
    file.write_bytes(data)
    refused(["report", str(file), "-o", str(tmp_path / "page.html")], [str(file), words], capsys)
    assert not (tmp_path / "page.html").exists()


def spoil(path: list[str | int], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(fields: Any) -> None:
        for key in path[:-1]:
            fields = fields[key]
        if value is ...:
            del fields[path[-1]]
        else:
            fields[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (serve_report, spoil(["phases", 1, "qps"], "many"), "$.phases[1].qps"),
        (serve_report, spoil(["phases", 1, "ttft", "p99"], None), "$.phases[1].ttft.p99"),
        (serve_report, spoil(["phases", 2, "ttft_histogram", "counts"], [1]), "one edge more than counts"),
        (serve_report, spoil(["url"], ...), "`url`"),
        (offline_report, spoil(["rows"], {}), "$.rows"),
        (offline_report, spoil(["rows", 0, "output_tokens_per_s"], ...), "`output_tokens_per_s`"),
        (static_report, spoil(["batches", 0, "prefill_ms", 0], "1"), "$.batches[0].prefill_ms[0]"),
        (static_report, spoil(["commit"], 7), "$.commit"),
    ],
)
def test_spoilt_reports_are_refused(
    tmp_path: Path,
    make: Callable[[], BenchmarkReport],
    change: Callable[[Any], None],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fields = msgspec.to_builtins(make())
    change(fields)
    file = tmp_path / "spoilt.json"
    file.write_bytes(msgspec.json.encode(fields))
    refused(["report", str(file), "-o", str(tmp_path / "page.html")], [str(file), "not a whole report", words], capsys)


def refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], status: int = 1) -> None:
    assert main(arguments) == status
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: ") and told.err.count("\n") == 1
    assert all(word in told.err for word in words), told.err


def test_other_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_report(static_report(), "good.json")
    refused(["report"], ["FILE"], capsys, status=2)
    refused(["report", "good.json", "--colour"], ["--colour"], capsys, status=2)
    refused(["report", "absent.json"], ["absent.json: cannot be read: No such file"], capsys)
    refused(["report", "."], [".: cannot be read: Is a directory"], capsys)
    refused(["report", "good.json", "absent.json"], ["absent.json"], capsys)
    refused(["report", "good.json", "-o", "absent/page.html"], ["--output absent/page.html: cannot write"], capsys)
    refused(["report", "good.json", "-o", "."], ["is a folder"], capsys)
    refused(["report", "good.json", "-o", "./good.json"], ["is one of the reports"], capsys)
    assert json.loads(Path("good.json").read_text())["benchmark"] == "static"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.json"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_report(static_report(), "a.json")
    assert main(["report", "a.json", "a.json", "--title", "Größe <1>"]) == 0
    assert capsys.readouterr().out == "report.html: 2 runs\n"
    seen = Seen(Path("report.html").read_text(encoding="utf-8"))
    assert seen.texts[0] == "Größe <1>"
    assert "SmolLM2-135M-Instruct · a · 2: latency" in seen.tables
    with pytest.raises(SystemExit) as exit_:
        main(["report", "--help"])
    assert exit_.value.code == 0


def test_older_reports_did_not_say_when(tmp_path: Path) -> None:
    fields = msgspec.to_builtins(offline_report())
    for name in ("started_at", "preset", "skipped"):
        del fields[name]
    for row in fields["rows"]:
        for name in ("iterations", "iteration_seconds", "published"):
            del row[name]
    file = tmp_path / "old.json"
    file.write_bytes(msgspec.json.encode(fields))
    (run,) = read_runs([str(file)])
    assert run.report.started_at == "" and "not said" in make_page([run])


def test_runs_are_told_apart() -> None:
    a, b = offline_report(), offline_report(model="org/llama-2-7b")
    assert name_runs(["x/a.json", "b.json"], [a, static_report()]) == ["llama-2-7b", "SmolLM2-135M-Instruct"]
    assert name_runs(["x/a.json", "y/b.json"], [a, b]) == ["llama-2-7b · a", "llama-2-7b · b"]
    assert name_runs(["x/a.json", "y/a.json"], [a, b]) == ["llama-2-7b · a · 1", "llama-2-7b · a · 2"]
    assert name_runs(["a.json", "b.json"], [a, static_report(model="llama-2-7b")]) == ["llama-2-7b", "llama-2-7b"]


# -- odd figures ---------------------------------------------------------------------------------------------------


def odd_phases(value: float) -> list[Any]:
    import random

    spread = Spread(*[value] * 6)
    odd = {
        "qps": value,
        "rate": value,
        "output_tokens_per_s": value,
        "ttft": spread,
        "itl": None,
        "e2e": spread,
        "ttft_histogram": LatencyHistogram([value, value + 1], [3]),
        "itl_histogram": LatencyHistogram([0.0], []),
        "goodput": None,
        "lag": None,
    }
    return [
        make_phase("odd", random.Random(1), 0.5, 1.0, **odd),
        make_phase("users", random.Random(1), 0.5, 1.0, mode="throughput", users=None, **odd),
    ]


@pytest.mark.parametrize("value", [0.0, 1e-9, 1.0, 1e15, 1e300, -5.0])
def test_odd_figures_make_a_page(tmp_path: Path, value: float) -> None:
    row = msgspec.structs.replace(
        offline_report().rows[0], output_tokens_per_s=value, step_ms=value, floor_tokens_per_s=value, of_floor=value
    )
    nothing = msgspec.structs.replace(row, step_ms=None, host_ms=None, first_token_ms=None, first_token_max_ms=None)
    batches = [
        BatchResult(batch_size=0, prefill_ms=[value], decode_tokens_per_s=[value, 1.0]),
        BatchResult(batch_size=7),
    ]
    reports = [
        serve_report(phases=odd_phases(value)),
        offline_report(rows=[row, nothing]),
        static_report(batches=batches),
    ]
    page = page_of(tmp_path, *reports)
    assert Seen(page).done()
    for number in re.findall(r' (?:[xyr]|[cxy][xy12]|width|height)="([^"]*)"', page):
        assert math.isfinite(float(number)), number
    assert not re.search(r'd="[^"]*(nan|inf|e\+)', page)


def test_reports_with_nothing_in_them(tmp_path: Path) -> None:
    empty = [serve_report(phases=[]), offline_report(rows=[], profiles=[]), static_report(batches=[])]
    page = page_of(tmp_path, *empty)
    assert page.count("Nothing was measured.") == 3 and "<figure>" not in page


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.0, 7.3), (0.0, 4821.0), (-3.0, 12.0), (0.0, 1e-7), (0.0, 1e12), (0.0, 3.0)]
)
def test_linear_ticks(low: float, high: float) -> None:
    ticks = linear_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 8 and all(low - 1e-9 <= tick <= high * (1 + 1e-9) for tick in ticks)
    assert len({short(tick) for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.9, 140.0), (3.0, 1e9), (1e-5, 1e12), (20.0, 25.0)])
def test_log_ticks(low: float, high: float) -> None:
    ticks = log_ticks(low, high, 6)
    assert 1 <= len(ticks) <= 6 and ticks == sorted(ticks) and low <= ticks[0] and ticks[-1] <= high


def test_axes() -> None:
    assert not axis([1.0, 30.0], 0, 100).log
    assert axis([1.0, 50.0], 0, 100).log
    assert not axis([0.0, 50.0, 0.1], 0, 100).log
    assert axis([], 0, 100)(0.5) == 50.0
    scale = Scale(1.0, 100.0, 0.0, 200.0, log=True)
    assert scale(10.0) == pytest.approx(100.0) and scale(0.0) == 0.0 and scale(1e9) == 200.0
    assert [short(value) for value in (0, 0.05, 1.5, 250, 1500, 20000, 1.5e6, 3e9, 2e-6)] == [
        "0",
        "0.05",
        "1.5",
        "250",
        "1.5k",
        "20k",
        "1.5M",
        "3G",
        "2.0e-06",
    ]


def test_the_page_is_made_without_torch() -> None:
    program = 'import sys; sys.modules["torch"] = None; import text_generation_inference.bench.page.command'
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
