"""The chat page in a real browser, against real servers: the embedded model, and a tiny one that sees and asks for a key.

The scenarios are JavaScript (`*.mjs`, run by `run.mjs` in one browser); each is a test here.
"""

import gzip
import json
import os
import re
import subprocess
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from page_tools import HERE, find_chromium, what_is_missing
from serving import Server
from vision_oracle import make_oracle

from text_generation_inference.api import static_pages

KEY = "the-key"
LIMIT_S = 300
FILES = ("answers", "around", "safety", "access", "dashboard", "last")
SCENARIOS = [
    name
    for file in FILES
    for name in re.findall(r"^export async function (\w+)", (HERE / f"{file}.mjs").read_text(encoding="utf-8"), re.M)
]


@pytest.fixture(scope="session")
def outcomes(
    server: Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str | None]]:
    """What went wrong in each scenario whose test was chosen."""
    missing = what_is_missing()
    if missing:
        assert os.environ.get("CI") != "true", missing
        pytest.skip(missing)
    oracle = make_oracle("llava_next", tmp_path_factory.mktemp("llava_next"))
    seeing = Server(
        *("--model-id", str(oracle.folder), "--max-total-tokens", "700", "--max-batch-total-tokens", "2800"),
        *("--dtype", "float32", "--max-concurrent-requests", "8", "--api-key", KEY),
    )
    try:
        chosen = {item.name.removeprefix("test_page[").removesuffix("]") for item in request.session.items}
        yield run_scenarios(server, seeing, [name for name in SCENARIOS if name in chosen])
    finally:
        status = seeing.stop()
    assert status == 0, seeing.log[-3000:]


def run_scenarios(server: Server, seeing: Server, names: list[str]) -> dict[str, str | None]:
    given = {"server": server.url, "seeing": seeing.url, "key": KEY, "pid": seeing.process.pid}
    done = subprocess.run(
        ["node", HERE / "run.mjs", json.dumps({**given, "chromium": find_chromium()}), *names],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr[-6000:]
    return {line["name"]: line["error"] for line in lines} | {"stderr": done.stderr[-3000:]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_page(outcomes: dict[str, str | None], name: str) -> None:
    assert name in outcomes, f"the browser ended before: {outcomes['stderr']}"
    assert outcomes[name] is None, outcomes[name]


# -- how its files are served --------------------------------------------------------------------------------------


def test_the_root_is_a_page_for_browsers_alone(http: httpx.Client) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
    page = http.get("/", headers=browser)
    assert page.content == http.get("/chat").content
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "accept" in page.headers["vary"]
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        probe = http.get("/", headers=accept)
        assert (probe.status_code, probe.content) == (200, b"")
    assert http.post("/", json={"inputs": "a", "parameters": {"max_new_tokens": 1}}, headers=browser).status_code == 200


def test_every_file_is_served_compressed_and_revalidated(http: httpx.Client) -> None:
    for path, file in static_pages.static_files().items():
        answer = http.get(f"/pages/{path}")
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.content == file.content
        assert answer.headers["content-type"] == file.content_type
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        again = http.get(f"/pages/{path}", headers={"if-none-match": f'"other",W/{answer.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert "content-length" not in again.headers
    plain = http.get("/chat", headers={"accept-encoding": "gzip;q=0, identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == static_pages.static_files()["chat/index.html"].content
    head = http.head("/chat")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(gzip.compress(plain.content, 9, mtime=0))


@pytest.mark.parametrize(
    "path",
    ["", "chat", "chat/", "nothing.js", "../app.py", "..%2Fapp.py", "chat/../../app.py", "/etc/passwd", "chat%00"],
)
def test_nothing_else_can_be_asked_for(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/pages/{path}")
    assert (answer.status_code, answer.content) == (404, b"")


def test_the_policy_of_a_page() -> None:
    policy = static_pages.content_security_policy("")
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert re.search(r"connect-src 'self';", policy)
    named = static_pages.content_security_policy(
        "server=http://10.0.0.2:8080&server=https%3A%2F%2Fa.example&server=http://[::1]:80&x=1&server=*"
        "&server=https://a.example;script-src%20*&server=data:&server=https://a.example/path&server=javascript:alert(1)"
    )
    assert "connect-src 'self' http://10.0.0.2:8080 https://a.example http://[::1]:80;" in named
    assert named.replace(" http://10.0.0.2:8080 https://a.example http://[::1]:80", "") == policy
    many = static_pages.content_security_policy("&".join(f"server=http://h{number}" for number in range(100)))
    assert many.count("http://") == 8


def test_pages_hold_no_inline_script_and_no_html_from_text() -> None:
    for path, file in static_pages.static_files().items():
        text = file.content.decode()
        if path.endswith(".html"):
            assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", text), path
        if path.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
            ), path
