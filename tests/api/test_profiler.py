"""Profiles of engine steps, scheduled at the start or asked for over HTTP; and a server that measures."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import Server

pytestmark = pytest.mark.one_rank  # that is where values are measured; profiles of ranks: test_rank_processes.py
KEY, ADMIN = "everyone", "only-me-42"
TRACES = "rank0_*.pt.trace.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def profiled(folder: Path, model_cache: Path) -> Iterator[Server]:
    config = folder / "measure.json"
    config.write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": str(folder / "stats" / "m")}))
    running = Server(
        *("--max-total-tokens", "128", "--max-batch-total-tokens", "1024", "--api-key", KEY),
        cache=model_cache,
        ADMIN_API_KEY=ADMIN,
        PROF_PATH=str(folder / "traces"),
        PROF_WAITSTEP="2",
        PROF_WARMUPSTEP="1",
        PROF_STEP="3",
        PROF_RECORD_SHAPES="true",
        QUANT_CONFIG=str(config),
    )
    yield running
    assert running.stop() == 0, running.log[-3000:]


def generate(server: Server, new: int) -> None:
    body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": new, "ignore_eos_token": True}}
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        assert client.post("/generate", json=body).status_code == 200


def call(server: Server, path: str, key: str | None = ADMIN, **body: object) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with server.client(headers=headers) as client:
        return client.post(path, **({"json": body} if body else {}))


def read(path: Path) -> tuple[list[dict], set[str]]:
    events = json.loads(path.read_text())["traceEvents"]
    return events, {event["name"] for event in events if event.get("cat") == "cpu_op"}


def test_a_profile_from_start_to_finish(profiled: Server, folder: Path) -> None:
    traces = folder / "traces"
    assert not list(traces.glob(TRACES))  # warming up is no step
    assert call(profiled, "/start_profile").json() == {
        "error": "a profile is being taken already",
        "error_type": "profiler",
    }
    generate(profiled, 5)
    assert not list(traces.glob(TRACES))  # the sixth step is its last
    generate(profiled, 3)
    profiled.wait_for(lambda: "profile written to" in profiled.log, "the scheduled profile")
    (path,) = traces.glob(TRACES)
    events, ops = read(path)
    assert any(event["name"].startswith("ProfilerStep#") for event in events)
    assert any(op.startswith("aten::") for op in ops)  # of the thread that computes
    assert any("Input Dims" in event.get("args", {}) for event in events)

    # Between start and stop.
    assert call(profiled, "/stop_profile").status_code == 409
    answer = call(profiled, "/start_profile", record_shapes=False)
    assert answer.status_code == 200 and answer.json() == {"folder": str(traces)}
    generate(profiled, 3)
    again = call(profiled, "/start_profile")
    assert again.status_code == 409
    answer = call(profiled, "/stop_profile")
    assert answer.status_code == 200
    events, ops = read(Path(answer.json()["path"]))
    assert ops and not any("Input Dims" in event.get("args", {}) for event in events)

    # It ends by itself after so many steps, and the server goes on.
    assert call(profiled, "/start_profile", num_steps=2).status_code == 200
    generate(profiled, 4)
    profiled.wait_for(lambda: len(list(traces.glob(TRACES))) == 3, "the third trace")
    assert call(profiled, "/stop_profile").json()["error"] == "no profile is being taken"

    # A trace that cannot be written is not said to be there, and the next one is made.
    assert call(profiled, "/start_profile").status_code == 200
    generate(profiled, 1)
    shutil.rmtree(traces)
    answer = call(profiled, "/stop_profile")
    assert answer.status_code == 409 and "could not be written" in answer.json()["error"]
    assert call(profiled, "/start_profile").status_code == 200
    assert Path(call(profiled, "/stop_profile").json()["path"]).is_file()


def test_only_an_administrator_may(profiled: Server) -> None:
    for path in ("/start_profile", "/stop_profile"):
        for key in (None, KEY, ADMIN[:-1], ADMIN.upper()):
            answer = call(profiled, path, key)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert profiled.client().get(path).status_code == 405
    # The key of an administrator is not one for everything else.
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    with profiled.client(headers={"authorization": f"Bearer {ADMIN}"}) as client:
        assert client.post("/generate", json=body).status_code == 401
    assert ADMIN not in profiled.log


@pytest.mark.parametrize(
    ("body", "words"),
    [({"num_steps": 0}, "num_steps"), ({"num_steps": 10**30}, "num_steps"), ({"record_shapes": 3}, "record_shapes")],
)
def test_bad_bodies(profiled: Server, body: dict, words: str) -> None:
    answer = call(profiled, "/start_profile", **body)
    assert answer.status_code == 422 and words in answer.text


def test_without_a_key_there_is_no_profile(server: Server) -> None:
    for path in ("/start_profile", "/stop_profile"):
        for key in (None, "x"):
            answer = call(server, path, key)
            assert answer.status_code == 404
            assert "ADMIN_API_KEY" in answer.json()["error"]


def test_a_server_that_measures_writes_when_it_is_idle(profiled: Server, folder: Path) -> None:
    generate(profiled, 2)
    path = folder / "stats" / "m_hooks_maxabs.json"
    profiled.wait_for(path.exists, "the statistics")
    nodes = json.loads(path.read_text())["Nodes"]
    assert len(nodes) == 30 * 11 + 1  # in a layer 7 matrices, 2 products of attention, its cache twice; and the head
    # What was measured before stays: a prompt with larger values can only raise them.
    before = nodes["model.layers.0.mlp.down_proj"]["inputs"][0][0][0]
    generate(profiled, 8)
    after = json.loads(path.read_text())["Nodes"]["model.layers.0.mlp.down_proj"]["inputs"][0][0][0]
    assert after >= before > 0
    assert "measuring: the largest values go to" in profiled.log
