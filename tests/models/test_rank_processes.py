"""One model over ranks in processes of their own: the same tokens as one rank, and what follows when a rank fails."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from driving import Output, Tiny, make_request, random_prompts, run, start

from text_generation_inference import failpoints
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine
from text_generation_inference.engine.profile import Profiling
from text_generation_inference.engine.ranks import Ranks
from text_generation_inference.errors import EngineError, StartError, TgiError
from text_generation_inference.types import GenerationRequest, Profile

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS: dict[str, Any] = {"max_batch_total_tokens": 2048, "max_total_tokens": 128, "device": "cpu"}


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """What goes wrong from now on, on which rank."""
    path = tmp_path / "faults"
    monkeypatch.setenv("TGI_FAILPOINTS", f"@{path}")
    failpoints.configure(f"@{path}")
    yield lambda text: (path.write_text(text), None)[1]
    failpoints.configure(None)


@contextmanager
def ranks(folder: Path, count: int, **settings: Any) -> Iterator[Engine]:
    """Nothing of them is left."""
    engine = start(folder, num_shard=count, **{**SETTINGS, **settings})
    assert isinstance(engine.rank, Ranks)
    pids = engine.rank.pids
    assert len(pids) == count - 1
    try:
        yield engine
    finally:
        engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def traffic(vocab_size: int = 320) -> list[GenerationRequest]:
    prompts = random_prompts(vocab_size, [5, 40, 9, 17])
    return [
        make_request(0, prompts[0], 12),
        make_request(1, prompts[1], 12, temperature=0.8, top_p=0.9, seed=3),
        make_request(2, prompts[2], 12, repetition_penalty=1.3, top_n_tokens=3),
        make_request(3, prompts[3], 12, decoder_input_details=True, temperature=1.1, top_k=20, seed=9),
    ]


def tokens(outputs: list[Output]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(tiny_llama: Tiny) -> list[Output]:
    engine = start(tiny_llama.folder, **SETTINGS)
    found = run(engine, traffic(), [0, 0, 3, 5])
    engine.close()
    return found


def test_two_ranks_equal_one(
    tiny_llama: Tiny, expected: list[Output], faults: Callable[[str], None], tmp_path: Path
) -> None:
    with ranks(tiny_llama.folder, 2) as engine:
        found = run(engine, traffic(), [0, 0, 3, 5])
        assert tokens(found) == tokens(expected)
        assert found[3].prompt_logprobs.keys() == expected[3].prompt_logprobs.keys()
        pid = engine.rank.pids[0]
        # Both lack memory at the same place: the step is taken back, on both.
        faults("engine.compute=memory@4; 1:engine.compute=memory@4")
        assert tokens(run(engine, traffic(), [0, 0, 3, 5])) == tokens(expected)
        assert engine.loop.scheduler.stats.num_rollbacks == 1
        # Any rank can be looked at.
        profiling = Profiling(
            ServerConfig(prof_path=str(tmp_path), prof_ranks=[0, 1], num_shard=2), engine.rank.profile
        )
        assert profiling.handle(Profile(1, True)).error is None
        run(engine, traffic()[:1])
        assert Path(profiling.handle(Profile(2, False)).path).parent == tmp_path
        assert {path.name[:6] for path in tmp_path.glob("*.trace.json")} == {"rank0_", "rank1_"}
        before = cpu_seconds(pid)
        time.sleep(0.5)
        assert cpu_seconds(pid) - before <= 0.05  # without work a rank does nothing


def test_four_ranks_equal_one(tiny_llama: Tiny, expected: list[Output], faults: Callable[[str], None]) -> None:
    """Through padded passes, too: ranks agree on which of them have graphs."""
    with ranks(tiny_llama.folder, 4, bucketing=True, max_batch_size=4) as engine:
        assert tokens(run(engine, traffic(), [0, 0, 3, 5])) == tokens(expected)
        error = fail(engine, lambda: faults("3:engine.compute=raise"))
        assert error == "a step failed on the device: rank 3: failpoint engine.compute"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def drain(engine: Engine) -> None:
    while engine.loop.has_work:
        engine.loop.step()


def fail(engine: Engine, harm: Callable[[], object], within_s: float = 2.0) -> str:
    """What the engine says when a rank is harmed in the midst of its work."""
    for request in traffic():
        engine.loop.add(request)
    for _ in range(5):
        engine.loop.step()
    harm()
    started = time.monotonic()
    with pytest.raises(EngineError) as caught:
        drain(engine)
    assert time.monotonic() - started < within_s
    return str(caught.value)


def test_a_rank_that_dies(tiny_llama: Tiny) -> None:
    with ranks(tiny_llama.folder, 2) as engine:
        error = fail(engine, lambda: os.kill(engine.rank.pids[0], signal.SIGKILL))
        assert error == "a step failed on the device: rank 1 was killed by SIGKILL"


def test_a_rank_that_hangs(tiny_llama: Tiny) -> None:
    with ranks(tiny_llama.folder, 2, step_timeout_s=1.5) as engine:
        error = fail(engine, lambda: os.kill(engine.rank.pids[0], signal.SIGSTOP), within_s=4.0)
        assert "rank 1 hung" in error


def test_a_rank_that_lacks_memory_alone(tiny_llama: Tiny, faults: Callable[[str], None]) -> None:
    with ranks(tiny_llama.folder, 2) as engine:
        error = fail(engine, lambda: faults("1:engine.compute=memory@1"), within_s=4.0)
        assert "rank 1: failpoint engine.compute: can't allocate memory" in error
        assert "in the middle of a step" in error


def test_a_rank_that_cannot_start(tiny_llama: Tiny, faults: Callable[[str], None]) -> None:
    faults("1:rank.load=raise")
    with pytest.raises(TgiError, match="rank 1: failpoint rank.load"):
        start(tiny_llama.folder, num_shard=2, **SETTINGS)
    with pytest.raises(
        StartError, match="cannot be split over 5 ranks: it has 4 attention heads"
    ):  # before anything is started
        start(tiny_llama.folder, num_shard=5, **SETTINGS)
