"""Tables of the benchmarks on terminals of several widths: nothing is lost, and no line is broken."""

import re
import sys

import pytest

from bench_samples import offline_report, serve_report, static_report
from terminal import run_on_terminal
from text_generation_inference.bench.offline_tables import rows_table
from text_generation_inference.bench.serve.tables import tables
from text_generation_inference.bench.static.tables import latency_table, throughput_table
from text_generation_inference.bench.tables import fit

TEXTS = {
    "serve": tables(serve_report().phases),
    "offline": rows_table(offline_report().rows),
    "static": latency_table(static_report().batches) + "\n\n" + throughput_table(static_report().batches),
}


def cells(text: str) -> list[str]:
    return sorted({cell.strip() for line in text.splitlines() for cell in line.strip("|").split("|")} - {""})


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("kind", TEXTS)
def test_every_figure_is_shown_within_the_width(kind, width):
    shown = fit(TEXTS[kind], width)
    assert max(map(len, shown.splitlines())) <= width
    figures = [cell for cell in cells(TEXTS[kind]) if re.search(r"\d", cell) and not re.fullmatch(r"p\d\d", cell)]
    flat = " ".join(shown.split())
    assert [figure for figure in figures if figure not in flat] == []


@pytest.mark.parametrize("kind", TEXTS)
def test_what_fits_is_left_alone(kind):
    assert fit(TEXTS[kind], 400) == TEXTS[kind]


def test_percentiles_say_of_what():
    shown = fit(TEXTS["serve"], 60)
    heads = [line for line in shown.splitlines() if line.startswith("| Benchmark")]
    assert len(heads) > 4 and not any(re.search(r"\| +p\d\d ", head) for head in heads)
    assert any("ITL p90" in head for head in heads) and any("Client lag p99" in head for head in heads)


@pytest.mark.parametrize("width", [50, 80])
def test_on_a_terminal(width):
    code = "from text_generation_inference.bench.tables import show; show('| a | b |\\n|:--|--:|\\n' + '\\n'.join(f'| row {n} | {n:>100} |' for n in range(3)))"
    status, shown = run_on_terminal([sys.executable, "-c", code], width)
    assert status == 0 and max(map(len, shown.splitlines())) <= width


def test_elsewhere_tables_stay_whole(capsys):
    from text_generation_inference.bench.tables import show

    show(TEXTS["serve"])
    assert capsys.readouterr().out == TEXTS["serve"] + "\n"
