"""From a benchmark's run to its page, as a user has it, and the page in a real browser."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench_samples import offline_report, serve_report, static_report, users_report
from browser import CHROMIUM, WHY_NOT, Tab, open_tab
from text_generation_inference.bench.report import write_report

TGI = [sys.executable, "-c", "from text_generation_inference.cli import main; import sys; sys.exit(main())"]
PAGES = {
    "phone": {"width": 360, "height": 740},
    "desktop": {"width": 1200},
    "dark": {"width": 1200, "dark": True},
    "paper": {"width": 680, "print_media": True},
}


def tgi(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*TGI, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A config without weights, in the folder where the commands run."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 200,
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(fields))
    return tmp_path


def test_a_preset_and_its_page(tiny: Path) -> None:
    """On a model so small that its positions are too few for one of the rows."""
    settings = ["--model-id", "tiny", "--load-format", "dummy", "--device", "cpu", "--json", "run.json"]
    done = tgi("bench", "offline", "--preset", "gaudi2-small", *settings, "--max-batch-total-tokens", "1120", cwd=tiny)
    assert done.returncode == 0, done.stderr
    assert "128/128 x4: skipped: needs 256 positions, the model has 200" in done.stderr
    assert "16/128 x8: skipped: needs a KV cache of 1,152 tokens, 1,120 fit into the memory" in done.stderr
    found = json.loads((tiny / "run.json").read_text())
    assert found["complete"] and found["preset"] == "gaudi2-small" and found["configuration"]["iterations"] == 2
    assert [(row["inputs"], row["outputs"], row["requests"]) for row in found["rows"]] == [(16, 16, 32)]
    assert {(row["inputs"], row["outputs"]) for row in found["skipped"]} == {(16, 128), (128, 16), (128, 128)}
    (row,) = found["rows"]
    assert row["iterations"] == len(row["iteration_seconds"]) == 2
    assert row["seconds"] == pytest.approx(sum(row["iteration_seconds"]), abs=2e-4)
    assert row["output_tokens_per_s"] == pytest.approx(2 * 32 * 16 / row["seconds"], rel=1e-2)
    assert row["published"] is None and row["num_steps"] >= 2 * 16

    done = tgi("bench", "report", "run.json", "--title", "Tiny", cwd=tiny)
    assert (done.returncode, done.stdout, done.stderr) == (0, "report.html: 1 run\n", "")
    page = (tiny / "report.html").read_text(encoding="utf-8")
    assert f"{row['output_tokens_per_s']:,.1f}" in page and "left out" in page and "gaudi2-small" in page


def test_time_left_on_a_terminal_and_ctrl_c(tiny: Path) -> None:
    """The iterations that were finished count."""
    ours, theirs = pty.openpty()
    settings = ["--model-id", "tiny", "--load-format", "dummy", "--device", "cpu", "--json", "run.json"]
    process = subprocess.Popen(
        [*TGI, "bench", "offline", "8/180/16", "--iterations", "5000", *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        cwd=tiny,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    told = ""
    try:
        while not re.search(r"8/180 x16 \(row 1 of 1\): ·{20} [0-9,]{6,} of 14,400,000 tokens \(\d%\), \d+:\d\d", told):
            assert select.select([ours], [], [], 60)[0], told[-2000:]
            told += os.read(ours, 65536).decode()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        told += os.read(ours, 65536).decode()
    finally:
        process.kill()
        os.close(ours)
    assert process.returncode == 130, told[-2000:]
    assert "8/180 x16" in out and "1 of 1 rows were measured" in told and "Traceback" not in told
    found = json.loads((tiny / "run.json").read_text())
    (row,) = found["rows"]
    assert not found["complete"] and 1 <= row["iterations"] == len(row["iteration_seconds"]) < 5000
    assert row["output_tokens_per_s"] == pytest.approx(row["iterations"] * 16 * 180 / row["seconds"], rel=1e-2)


@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    reports = [
        serve_report(),
        serve_report(1.3, 2),
        users_report(),
        offline_report(),
        offline_report(0.9),
        static_report(),
    ]
    files = []
    for number, report in enumerate(reports):
        files.append(str(tmp_path / f"{number}.json"))
        write_report(report, files[-1])
    assert tgi("bench", "report", *files, cwd=tmp_path).returncode == 0
    page = tmp_path / "report.html"
    asyncio.run(asyncio.wait_for(look_at(page), 240))


async def look_at(page: Path) -> None:
    shots = os.environ.get("TGI_TEST_SCREENSHOTS")  # a folder, to see what the browser shows
    async with open_tab() as tab:
        for name, settings in PAGES.items():
            await tab.open(page.as_uri(), **settings)
            if shots is not None:
                await tab.screenshot(Path(shots) / f"{name}.png")
            await check_layout(tab, name, settings["width"])
            if name == "desktop":
                await check_behaviour(tab)
        pdf = await tab.pdf()
        assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page\n") > 3
        assert tab.problems == []
        assert set(tab.requests) == {page.as_uri()}


async def check_layout(tab: Tab, name: str, width: int) -> None:
    assert await tab.evaluate("document.documentElement.scrollWidth") <= width, f"{name}: wider than the screen"
    small = await tab.evaluate(
        "Math.min(...[...document.querySelectorAll('figure text')].map(text => text.getBoundingClientRect().height))"
    )
    assert small > 9, f"{name}: text of {small} pixels"
    background = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(int(part) for part in background[4:-1].split(",")) < 300
    assert dark == (name == "dark"), background
    if name == "paper":
        cut = await tab.evaluate(
            "[...document.querySelectorAll('.scroll, figure, .card')].filter(part => part.scrollWidth > part.clientWidth + 1)"
            ".map(part => part.textContent.slice(0, 60))"
        )
        assert cut == []


async def check_behaviour(tab: Tab) -> None:
    """A run can be hidden in all charts of its section; marks say their values; both by hand of the reader."""
    drawn = ".map(part => getComputedStyle(part).display !== 'none')"
    shown = f"[...document.querySelectorAll('#serving .run[data-run=\"2\"]')]{drawn}"
    before = await tab.evaluate(shown)
    assert len(before) > 4 and all(before)
    await tab.evaluate("document.querySelector('#serving .legend button[data-run=\"2\"]').click()")
    assert not any(await tab.evaluate(shown))
    others = '[...document.querySelectorAll(\'#serving .run[data-run="1"], #offline .run[data-run="2"]\')]'
    assert all(await tab.evaluate(others + drawn))
    await tab.evaluate("document.querySelector('#serving .legend button[data-run=\"2\"]').click()")
    assert all(await tab.evaluate(shown))

    place = await tab.evaluate(
        "(() => { const mark = document.querySelector('#serving .touch'); mark.scrollIntoView({block: 'center',"
        " behavior: 'instant'}); const box = mark.getBoundingClientRect();"
        " return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
    )
    await tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # scrolled
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["x"], y=place["y"])
    words = await tab.evaluate("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")
    assert "Llama-3.1-8B" in words and "requests/s" in words and "p99" in words
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert await tab.evaluate("document.getElementById('tip').hidden")
    names = await tab.evaluate(
        "[...document.querySelectorAll('figure svg')].map(each => each.getAttribute('aria-label'))"
    )
    assert all(names) and await tab.evaluate(
        "[...document.querySelectorAll('figure svg desc')].every(d => d.textContent)"
    )
