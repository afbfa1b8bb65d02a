"""Makes a site of the pages of docs/ and of those at the root that they link to: `make docs`, into site/.

Plain HTML with one style and one script, which searches; nothing is loaded from elsewhere. Every link inside is
checked: a page without a place in `SECTIONS`, a link to a file or heading that is not there, ends it with a list and
status 1.
"""

import argparse
import html
import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = ROOT / "src" / "text_generation_inference" / "api" / "pages"
SECTIONS = {
    "Start": [
        "docs/index",
        "docs/start-cpu",
        "docs/start-nvidia",
        "docs/start-gaudi",
        "docs/start-tgi",
        "docs/start-vllm",
    ],
    "Use": [
        *("README", "docs/cli", "docs/environment", "docs/sampling", "docs/models", "docs/apis", "docs/page"),
        *("docs/pictures", "docs/quantization", "docs/measured-fp8"),
    ],
    "Run": [
        *("docs/images", "docs/observability", "docs/dashboards", "docs/scaling", "docs/replicas", "docs/ranks"),
        *("docs/benchmarking", "bench/RESULTS"),
    ],
    "Devices": ["docs/cuda", "docs/gaudi", "docs/buckets"],
    "Project": [
        *("docs/compatibility", "docs/structure", "CONTRIBUTING", "CHANGELOG", "SECURITY"),
    ],
}
_LEXERS = {"bash": "bash", "python": "python", "json": "json", "text": "text"}


@dataclass
class Page:
    source: PurePosixPath  # from the root of the repository
    name: str  # of the file in the site
    title: str = ""
    body: str = ""
    headings: list[tuple[int, str, str]] = field(default_factory=list)  # level, anchor, text
    links: list[str] = field(default_factory=list)  # as written
    words: str = ""  # for the search


class SiteError(Exception):
    """What is wrong, a line each."""


def anchor_of(text: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")


def text_of(token: Token) -> str:
    parts = {"text": None, "code_inline": None, "softbreak": " ", "hardbreak": " "}
    return "".join(parts[child.type] or child.content for child in token.children or [] if child.type in parts)


def find_pages(root: Path) -> list[Page]:
    named = [f"{path}.md" for section in SECTIONS.values() for path in section]
    wrong = [f"{path}: named in SECTIONS and not there" for path in named if not (root / path).is_file()]
    there = {f"docs/{path.name}" for path in (root / "docs").glob("*.md")}
    wrong += [f"{path}: not in SECTIONS" for path in sorted(there - set(named))]
    if wrong:
        raise SiteError("\n".join(wrong))
    sources = [PurePosixPath(path) for path in named]
    return [Page(source, f"{source.stem.lower()}.html") for source in sources]


def _highlight(code: str, language: str, _attributes: str) -> str:
    lexer = get_lexer_by_name(_LEXERS.get(language, "text"))
    return highlight(code, lexer, HtmlFormatter[str](nowrap=True))


class Renderer:
    """Markdown to HTML, links to those of the site."""

    def __init__(self, pages: list[Page], root: Path) -> None:
        self._names = {page.source: page.name for page in pages}
        self._root = root
        self._markdown = MarkdownIt("commonmark", {"html": False, "highlight": _highlight}).enable("table")
        self.wrong: list[str] = []
        self.pictures: set[PurePosixPath] = set()

    def render(self, page: Page) -> None:
        tokens = self._markdown.parse((self._root / page.source).read_text(encoding="utf-8"))
        seen: dict[str, int] = {}
        words: list[str] = []
        for place, token in enumerate(tokens):
            if token.type == "heading_open":
                self._head(page, token, tokens[place + 1], seen)
            if token.type == "inline":
                words.append(text_of(token))
                self._point(page, token.children or [])
            elif token.type == "fence":
                words.append(token.content)
        page.title = next((text for level, _, text in page.headings if level == 1), page.name)
        page.words = re.sub(r"\s+", " ", " ".join(words))
        made = self._markdown.renderer.render(tokens, self._markdown.options, {})
        made = made.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
        page.body = made.replace("<pre>", '<pre tabindex="0">')

    def _head(self, page: Page, token: Token, inline: Token, seen: dict[str, int]) -> None:
        text = text_of(inline)
        anchor = anchor_of(text)
        number = seen.get(anchor, 0)
        seen[anchor] = number + 1
        anchor = f"{anchor}-{number}" if number else anchor
        token.attrSet("id", anchor)
        page.headings.append((int(token.tag[1]), anchor, text))

    def _point(self, page: Page, children: list[Token]) -> None:
        for child in children:
            if child.type == "image":
                child.attrSet("src", self._picture(page, str(child.attrs["src"])))
            if child.children:  # a picture that is a link, and the other way round
                self._point(page, child.children)
            if child.type == "link_open":
                target = str(child.attrs["href"])
                page.links.append(target)
                child.attrSet("href", self._address(page, target))

    def _picture(self, page: Page, target: str) -> str:
        """One of the repository's own; it comes along."""
        found = _normal(page.source.parent / target)
        if not (self._root / found).is_file():
            self.wrong.append(f"{page.source}: {target} is no picture of the repository")
        self.pictures.add(found)
        return found.name

    def _address(self, page: Page, target: str) -> str:
        if re.match(r"https?://|mailto:", target):
            return target
        path, _, anchor = target.partition("#")
        found = _normal(page.source.parent / path) if path else page.source
        name = self._names.get(found)
        if name is None:
            self.wrong.append(f"{page.source}: {target} is no page of the site")
            return target
        return f"{name}#{anchor}" if anchor else name


def _normal(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return PurePosixPath(*parts)


def check_links(pages: list[Page]) -> list[str]:
    """Headings that are linked to and not there, in the HTML as it was made."""
    anchors = {page.name: {anchor for _, anchor, _ in page.headings} for page in pages}
    wrong: list[str] = []
    for page in pages:
        for target in re.findall(r'<a href="([^"]+)"', page.body):
            name, _, anchor = html.unescape(target).partition("#")
            if anchor and not re.match(r"https?:", target) and anchor not in anchors.get(name or page.name, set()):
                wrong.append(f"{page.source}: {target}: there is no such heading")
    return wrong


# -- the pages around the text -------------------------------------------------------------------------------------


def navigation(pages: list[Page], current: Page) -> str:
    by_source = {str(page.source): page for page in pages}
    lines: list[str] = []
    for title, paths in SECTIONS.items():
        lines.append(f"<h2>{html.escape(title)}</h2><ul>")
        for path in paths:
            page = by_source[f"{path}.md"]
            here = ' aria-current="page"' if page is current else ""
            lines.append(f'<li><a href="{page.name}"{here}>{html.escape(page.title)}</a></li>')
        lines.append("</ul>")
    return "".join(lines)


def contents(page: Page) -> str:
    entries = [
        f'<li class="level-{level}"><a href="#{anchor}">{html.escape(text)}</a></li>'
        for level, anchor, text in page.headings
        if level in (2, 3)
    ]
    return f"<h2>On this page</h2><ul>{''.join(entries)}</ul>" if len(entries) > 1 else ""


def whole(template: str, pages: list[Page], place: int) -> str:
    page = pages[place]
    before = pages[place - 1] if place else None
    after = pages[place + 1] if place + 1 < len(pages) else None
    turns = f'<a rel="prev" href="{before.name}">← {html.escape(before.title)}</a>' if before else "<span></span>"
    turns += f'<a rel="next" href="{after.name}">{html.escape(after.title)} →</a>' if after else ""
    filled: dict[str, Any] = {
        "title": html.escape(page.title),
        "navigation": navigation(pages, page),
        "contents": contents(page),
        "body": page.body,
        "turns": turns,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], template)


def build(root: Path, target: Path) -> list[Page]:
    """Raises `SiteError`."""
    pages = find_pages(root)
    renderer = Renderer(pages, root)
    for page in pages:
        renderer.render(page)
    wrong = renderer.wrong + check_links(pages)
    if wrong:
        raise SiteError("\n".join(wrong))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    template = (HERE / "page.html").read_text(encoding="utf-8")
    for place, page in enumerate(pages):
        (target / page.name).write_text(whole(template, pages, place), encoding="utf-8")
    for picture in renderer.pictures:
        shutil.copy(root / picture, target / picture.name)
    entries = [{"page": page.name, "title": page.title, "heads": page.headings, "words": page.words} for page in pages]
    (target / "search-index.js").write_text(f"window.searchIndex = {json.dumps(entries)};\n", encoding="utf-8")
    shutil.copy(HERE / "search.js", target)
    shutil.copy(PAGES / "common" / "theme.js", target)
    shutil.copy(PAGES / "common" / "icon.svg", target)
    style = (PAGES / "common" / "common.css").read_text(encoding="utf-8") + (HERE / "site.css").read_text(
        encoding="utf-8"
    )
    (target / "site.css").write_text(style, encoding="utf-8")
    return pages


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a site of the documentation.")
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    out: Path = parser.parse_args().out
    try:
        pages = build(ROOT, out)
    except SiteError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(pages)} pages in {out}: open {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
