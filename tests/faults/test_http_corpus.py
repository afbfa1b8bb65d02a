"""Requests as they should not be, byte for byte: each gets the answer that its file says, and disturbs nobody.

With nginx in front (where it is installed) the two must agree on where each request ends: whoever shares nginx's
connection to the server afterwards gets the answer to their own request.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from dropping import Books
from raw_http import CASES, Case, Outcome, connect, exchange
from serving import NO_TLS, Server, free_port

pytestmark = pytest.mark.usefixtures("prompt_event_loop")

LAG_S = 5.0  # far more than an answer takes, far less than what a stalled loop costs


def honest(url: str, word: str) -> None:
    """A request whose answer names it."""
    start = time.monotonic()
    answer = httpx.post(url + "/tokenize", json={"inputs": word}, timeout=30, verify=NO_TLS)
    assert answer.status_code == 200 and "".join(token["text"] for token in answer.json()) == word
    assert time.monotonic() - start < LAG_S


@pytest.fixture(scope="module")
def unharmed(server: Server) -> Iterator[Server]:
    """What the server held before the corpus it holds after it."""
    honest(server.url, "before")
    before = Books(server)
    children = server.children()
    yield server
    server.wait_for(lambda: Books(server).descriptors <= before.descriptors + 2, "connections to be closed")
    assert Books(server).memory < before.memory + 64 * 2**20
    assert server.children() == children
    assert "Traceback" not in server.log, server.log[-3000:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers(unharmed: Server, case: Case) -> None:
    outcome = exchange(unharmed.port, case, len(case.answers))
    assert outcome.statuses == case.answers, outcome.data[-500:]
    assert outcome.stays_open == case.stays_open, outcome.data[-500:]
    assert case.text in outcome.data
    assert not case.absent or case.absent not in outcome.data
    honest(unharmed.url, "corpus")


# -- behind nginx ----------------------------------------------------------------------------------------------------

CONFIG = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    client_max_body_size 0; large_client_header_buffers 4 32k; client_header_timeout 2s; client_body_timeout 2s;
    upstream behind {{ server 127.0.0.1:{port}; keepalive 1; }}
    server {{
        listen 127.0.0.1:{front};
        location / {{
            proxy_pass http://behind; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_request_buffering off; proxy_read_timeout 20s;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def nginx(unharmed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("nginx is not installed")
    folder, front = tmp_path_factory.mktemp("nginx"), free_port()
    path = Path(folder, "nginx.conf")
    path.write_text(CONFIG.format(folder=folder, port=unharmed.port, front=front))
    process = subprocess.Popen([program, "-p", folder, "-e", f"{folder}/error.log", "-c", path])
    try:
        for _ in range(200):
            assert process.poll() is None, Path(folder, "error.log").read_text()
            try:
                connect(front).close()
                break
            except ConnectionError:
                time.sleep(0.05)
        yield front
    finally:
        process.terminate()
        process.wait(20)


def fits(case: Case, outcome: Outcome) -> bool:
    first = outcome.statuses[0] if outcome.statuses else 0
    match case.nginx:
        case "":
            return first == case.answers[0]
        case "refused":
            return first >= 400 or first == 0
        case "repaired":
            return first in (200, 404, *case.answers)
        case kind:
            return kind == "any"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_behind_nginx(unharmed: Server, nginx: int, case: Case) -> None:
    outcome = exchange(nginx, case, len(case.answers))
    assert fits(case, outcome), outcome
    num_sent = max(1, len(case.answers), case.raw.count(b"GET /health HTTP/1.1\r\n"))
    assert len([status for status in outcome.statuses if status >= 200]) <= num_sent
    for number in range(2):  # both over the one connection that nginx keeps
        honest(f"http://127.0.0.1:{nginx}", f"behind {number} {case.name.replace('_', ' ')}")
