"""What must not be told: prompts in logs, paths and the engine's own words in answers; who shares a prefix."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import Server

FOLDER = "canary-folder-41d7"
PROMPT = "canary prompt 9c2e of a user"


@pytest.fixture(scope="module")
def guarded(
    server: Server, model_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A server of a model in a folder of ours, which tells as little as it may."""
    converted = next((model_cache / "converted").glob("*/config.json")).parent
    parent = tmp_path_factory.mktemp(FOLDER)
    shutil.copytree(converted, parent / "model-of-ours", copy_function=os.link)
    faults = tmp_path_factory.mktemp("faults") / "asked"
    running = Server(
        "--model-id", str(parent / "model-of-ours"), "--max-total-tokens", "256", "--max-batch-total-tokens", "4096",
        "--cache-salt-by-key", "--hide-cached-tokens", "--max-concurrent-requests", "1",
        cache=model_cache, TGI_FAILPOINTS=f"@{faults}",
    )  # fmt: skip
    yield running, faults
    running.stop(signal.SIGKILL)


def test_no_path_of_the_server_reaches_a_caller(guarded: tuple[Server, Path]) -> None:
    server, faults = guarded
    told: list[str] = []
    with server.client() as http:

        def ask(method: str, path: str, **options) -> httpx.Response:
            answer = http.request(method, path, **options)
            told.append(f"{method} {path} {answer.status_code} {answer.headers!r} {answer.text}")
            return answer

        info = ask("GET", "/info").json()
        assert info["model_id"] == "model-of-ours"
        assert ask("GET", "/v1/models").json()["data"][0]["id"] == "model-of-ours"
        assert ask("GET", "/v1/models/model-of-ours").status_code == 200
        for path in ("/health", "/metrics", "/v2", "/docs", "/api-doc/openapi.json", "/nothing", "/v1/nothing"):
            ask("GET", path)
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
        assert ask("POST", "/v1/chat/completions", json=chat).json()["model"] == "model-of-ours"
        ask("POST", "/v1/chat/completions", json={**chat, "tools": [{"type": "x"}]})
        ask("POST", "/chat_tokenize", json=chat)
        ask("POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        ask("POST", "/v1/completions", json={"prompt": PROMPT * 400})
        ask("POST", "/generate", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 2}})
        ask("POST", "/generate", json={"inputs": PROMPT, "parameters": {"grammar": {"type": "regex", "value": "("}}})
        ask("POST", "/generate", content=b"{", headers={"content-type": "application/json"})
        # The engine fails in the middle of a request, and says on its standard error what and where.
        faults.write_text("engine.apply=raise@2")
        lost = ask("POST", "/generate", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 50}})
        assert (lost.status_code, lost.json()["error_type"]) == (424, "generation")
        faults.write_text("")
        server.wait_for(lambda: "failpoint" in server.log, "the engine's words in the log")
        away = ask("POST", "/generate", json={"inputs": PROMPT})
        assert away.status_code in (200, 503)
        server.wait_for(lambda: http.get("/health").status_code == 200, "the engine")
        pid = server.children()["engine"]
        with http.stream("POST", "/generate_stream", json={"inputs": PROMPT}) as events:
            lines = events.iter_lines()
            told.append(next(lines))
            os.kill(pid, signal.SIGKILL)
            told.extend(lines)
        server.wait_for(lambda: http.get("/health").status_code == 200, "the engine again")
    text = "\n".join(told)
    for canary in (FOLDER, "/tmp", "site-packages", ".py", "failpoint", "Traceback"):
        assert canary not in text.replace("docs.python", ""), [line for line in told if canary in line][:3]
    assert PROMPT not in server.log


def test_keys_keep_prefixes_apart_and_nobody_is_told(guarded: tuple[Server, Path]) -> None:
    server, _ = guarded
    text = "keys keep the cached prefixes of tenants apart " * 10

    def count() -> float:
        return server.metrics().get("tgi_cached_prompt_tokens", 0)

    with server.client() as http:

        def ask(key: str | None, **fields: object) -> None:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            before = server.metrics()["tgi_prompt_tokens"]
            answer = http.post("/v1/completions", json={"prompt": text, "max_tokens": 1, **fields}, headers=headers)
            assert answer.status_code == 200
            assert set(answer.json()["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
            server.wait_for(lambda: server.metrics()["tgi_prompt_tokens"] > before, "the engine's count")

        http.post("/v1/completions", json={"prompt": "b", "max_tokens": 1})
        server.wait_for(lambda: "tgi_prompt_tokens" in server.metrics(), "the engine's count")
        before = count()
        ask("one")
        ask("two")
        ask(None)
        ask("two", cache_salt="mine")
        assert count() == before
        ask("one")
        assert count() > before


def test_tokenize_obeys_admission(guarded: tuple[Server, Path]) -> None:
    server, _ = guarded
    with server.client() as http, server.client() as other:
        long = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with other.stream("POST", "/v1/completions", json=long) as events:
            lines = events.iter_lines()  # kept: the connection is closed with it
            next(lines)
            assert http.post("/tokenize", json={"inputs": "a"}).status_code == 429
            chat = {"messages": [{"role": "user", "content": "a"}]}
            assert http.post("/chat_tokenize", json=chat).status_code == 429
        server.wait_for(lambda: http.post("/tokenize", json={"inputs": "a"}).status_code == 200, "a place")
