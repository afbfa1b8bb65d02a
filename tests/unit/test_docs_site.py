"""The site of the documentation, and what its first pages say of flags, variables and metrics."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from text_generation_inference.launch.arguments import build_parser

ROOT = Path(__file__).parents[2]
STARTS = sorted((ROOT / "docs").glob("start-*.md"))
NOT_OURS = {"--gpus", "--shm-size", "--runtime", "--cap-add", "--ipc"}  # Docker's


def build(out: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    script = root / "tools" / "docs_site" / "build.py"
    return subprocess.run([sys.executable, script, "--out", out], capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    done = build(out)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.name for path in site.glob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} < pages
    assert {"readme.html", "changelog.html", "results.html"} < pages
    for page in sorted(pages):
        text = (site / page).read_text()
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', text)
        assert len(loaded) >= 4 and all((site / name).is_file() for name in loaded)
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=", text)
        for target in re.findall(r'<a (?:class="\w+" |rel="\w+" )?href="([^"#]+)', text):
            assert target.startswith("http") or (site / target).is_file(), (page, target)
    for name in ("site.css", "search.js", "theme.js"):
        assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", (site / name).read_text())


def test_text_is_no_markup(site: Path) -> None:
    """A page about HTTP holds signs that HTML would read."""
    text = (site / "observability.html").read_text()
    assert "<table>" in text and 'id="questions-and-queries"' in text
    assert "{{" not in re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", text, flags=re.S)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[x](nothing.md)", "nothing.md is no page"),
        ("[x](cli.md#nothing)", "cli.html#nothing: there is no such heading"),
        ("![x](http://example.com/x.png)", "is no picture of the repository"),
    ],
)
def test_what_leads_nowhere_is_found(tmp_path: Path, line: str, told: str) -> None:
    for name in ("docs", "tools/docs_site", "src/text_generation_inference/api/pages/common"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bench").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench/RESULTS.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "docs" / "start-cpu.md").open("a") as page:
        page.write(f"\n{line}\n")
    done = build(tmp_path / "site", tmp_path)
    assert done.returncode == 1 and told in done.stderr and done.stderr.count("\n") == 1


def own_cells(page: Path) -> str:
    """The page without the first column of tables about another program: what is said of this one."""
    lines = page.read_text().splitlines()
    other = False
    kept: list[str] = []
    for line in lines:
        if line.startswith("| vLLM |"):
            other = True
        elif not line.startswith("|"):
            other = False
        kept.append(line.split(" | ", 1)[-1] if other else line)
    return "\n".join(kept)


@pytest.mark.parametrize("page", STARTS, ids=lambda page: page.stem)
def test_flags_and_metrics_of_a_first_page_are_ours(page: Path) -> None:
    text = own_cells(page)
    flags = set(re.findall(r"--[a-z][a-z-]+", build_parser("test", "").format_help()))
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)) - NOT_OURS
    assert named and named <= flags
    metrics = set(re.findall(r"`(tgi_[a-z_]+)`", text))
    told = (ROOT / "docs" / "observability.md").read_text() + (ROOT / "docs" / "buckets.md").read_text()
    assert [name for name in metrics if f"`{name}`" not in told] == []
    variables = set(re.findall(r"`([A-Z][A-Z_]{5,})`", text))
    known = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("environment", "cli", "gaudi"))
    assert [name for name in variables if name not in known] == []


def test_readme_leads_to_the_first_pages() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(STARTS) == 5 and all(f"(docs/{page.name})" in readme for page in STARTS)
