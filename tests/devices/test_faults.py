"""A device that runs out of memory, or that cannot be used any more."""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from driving import Output, Tiny, collect, make_request, make_tiny, random_prompts, start
from queue_on_cpu import QueueOnCpu

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import Engine
from text_generation_inference.engine.client import EngineClient
from text_generation_inference.engine.status import EXIT_ENGINE_FAILED
from text_generation_inference.errors import EngineError
from text_generation_inference.types import GenerationRequest, StepPlan

NEW = 14
PARAMS: list[dict] = [
    {},
    {"do_sample": True},
    {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.3},
    {"decoder_input_details": True},
    {"top_n_tokens": 3},
    {"watermark": True, "temperature": 0.7},
]


def no_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")


class Faulty(QueueOnCpu):
    """Fails chosen ops of a step, or chosen results, with an error."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.fail_op_calls: set[int] = set()
        self.fail_results: set[int] = set()
        self.error: Exception = no_memory()
        self.num_op_calls = self.num_results = self.num_failed = 0
        self.ops.rms_norm = self._failing(self.ops.rms_norm)
        self.ops.add_rms_norm = self._failing(self.ops.add_rms_norm)
        self.ops.greedy_into = self._failing(self.ops.greedy_into)
        self.ops.choose_into = self._failing(self.ops.choose_into)

    def _failing(self, op: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.num_op_calls += 1
            if self.num_op_calls in self.fail_op_calls:
                self.num_failed += 1
                raise self.error
            return op(*arguments, **options)

        return call

    def launch(self, queue: Any) -> "Future[Any]":
        def queue_one_that_fails() -> Any:
            finish = queue()
            self.num_results += 1
            number = self.num_results

            def fail_or_finish() -> Any:
                if number in self.fail_results:
                    self.num_failed += 1
                    raise self.error
                return finish()

            return fail_or_finish

        return super().launch(queue_one_that_fails)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {}, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def cpu_only(device_name: str) -> None:
    if device_name != "cpu":
        pytest.skip("the faults are those of a device double")


@pytest.fixture
def engines(cpu_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    started: list[Engine] = []

    def start_engine(folder: Path, **settings: object) -> tuple[Engine, Faulty]:
        device = Faulty(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
            engine = start(folder, **{"max_batch_size": 8, "max_total_tokens": 120, **settings})
        device.num_op_calls = device.num_results = 0
        started.append(engine)
        return engine, device

    yield start_engine
    for engine in started:
        engine.close()


def ask(count: int = 9) -> list[GenerationRequest]:
    prompts = random_prompts(320, [1 + 11 * n % 60 for n in range(count)], seed=5)
    return [make_request(n, prompt, NEW, seed=100 + n, **PARAMS[n % len(PARAMS)]) for n, prompt in enumerate(prompts)]


def run(engine: Engine, requests: list[GenerationRequest], arrivals: list[int]) -> list[Output]:
    outputs = {request.id: Output() for request in requests}
    queue = sorted(zip(arrivals, range(len(requests)), strict=True))
    for step in range(20_000):
        if not queue and not engine.loop.has_work:
            break
        while queue and queue[0][0] <= step:
            engine.loop.add(requests[queue.pop(0)[1]])
        collect(engine.loop.step(), outputs)
        engine.loop.scheduler.check()
    assert not engine.loop.has_work, "no progress"
    pool = engine.loop.scheduler.pool
    assert pool.num_free == pool.num_usable
    return [outputs[request.id] for request in requests]


def same(ours: list[Output], expected: list[Output]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine.token_ids, mine.reason, mine.error) == (theirs.token_ids, theirs.reason, theirs.error)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-4)
        assert mine.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=2e-4)
        assert [list(top) for top in mine.top_tokens] == [list(top) for top in theirs.top_tokens]


ARRIVALS = [0, 0, 0, 1, 1, 2, 5, 9, 9]


@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"max_batch_prefill_tokens": 16}, {"cuda_graphs": [0]}])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_memory_in_some_steps_changes_no_answer(tiny: Tiny, engines: Any, settings: dict, seed: int) -> None:
    calm, _ = engines(tiny.folder, **settings)
    expected = run(calm, ask(), ARRIVALS)
    engine, device = engines(tiny.folder, **settings)
    rng = random.Random(seed)
    # Never twice in a row: a request that fails so when it is alone ends with an error.
    device.fail_op_calls = {60 * number + rng.randrange(30) for number in range(1, 5)}
    device.fail_results = {20 * number + rng.randrange(5) for number in range(3, 6)}
    same(run(engine, ask(), ARRIVALS), expected)
    assert device.num_failed >= 4
    assert engine.loop.scheduler.stats.num_rollbacks > 0
    same(run(engine, ask(), ARRIVALS), expected)  # and everything is as before


def test_aborts_beside_a_lack_of_memory(tiny: Tiny, engines: Any) -> None:
    calm, _ = engines(tiny.folder)
    expected = run(calm, ask(), ARRIVALS)
    engine, device = engines(tiny.folder)
    for at in range(1, 30):
        device.num_op_calls = 0
        device.fail_op_calls = {3 * at}
        for request in ask():
            engine.loop.add(request)
        for _ in range(at % 7):
            engine.loop.step()
        for request in ask():
            engine.loop.abort(request.id)
        engine.loop.scheduler.check()
    device.fail_op_calls = set()
    while engine.loop.has_work:
        engine.loop.step()
    same(run(engine, ask(), ARRIVALS), expected)


class TooLarge(Faulty):
    """Has memory for so many tokens in a step, and none at all for one request."""

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.room = 10**9
        embedding = self.ops.embedding

        def look_up(ids: torch.Tensor, weight: Any) -> Any:
            if ids.shape[0] > self.room:
                self.num_failed += 1
                raise self.error
            return embedding(ids, weight)

        self.ops.embedding = look_up


@pytest.mark.parametrize("room", [60, 33])
def test_steps_shrink_until_they_fit(
    tiny: Tiny, cpu_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Any, room: int
) -> None:
    calm, _ = engines(tiny.folder)
    expected = run(calm, ask(), [0] * 9)
    device = TooLarge(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
        engine = start(tiny.folder, max_batch_size=8, max_total_tokens=120)
    device.room = room
    same(run(engine, ask(), [0] * 9), expected)
    assert device.num_failed > 0
    engine.close()


def test_a_request_that_does_not_fit_alone_ends_alone(tiny: Tiny, engines: Any) -> None:
    engine, _ = engines(tiny.folder)
    runner = engine.rank.runner
    launch = runner._queue
    victim = 4

    def fail_with_victim(plan: StepPlan, previous: Any) -> Any:
        for admission in plan.admit:
            holders[admission.slot] = admission.request.id
        rows = [*(chunk.slot for chunk in plan.chunks), *(runner.slots.decode_slots if plan.decode else [])]
        if victim in [holders[slot] for slot in rows]:
            raise no_memory()
        return launch(plan, previous)

    holders: dict[int, int] = {}
    calm, _ = engines(tiny.folder)
    expected = run(calm, ask(), ARRIVALS)
    runner._queue = fail_with_victim
    outputs = run(engine, ask(), ARRIVALS)
    assert outputs[victim].reason == "error"
    assert outputs[victim].error == "not enough memory on the device for this request alone: CUDA out of memory"
    same(
        [output for n, output in enumerate(outputs) if n != victim],
        [output for n, output in enumerate(expected) if n != victim],
    )
    runner._queue = launch
    same(run(engine, ask(), ARRIVALS), expected)


@pytest.mark.parametrize("where", ["fail_op_calls", "fail_results"])
def test_any_other_error_ends_the_engine(tiny: Tiny, engines: Any, where: str) -> None:
    engine, device = engines(tiny.folder)
    device.error = RuntimeError("CUDA error: device-side assert triggered")
    setattr(device, where, {5})
    with pytest.raises(EngineError, match="device-side assert"):
        run(engine, ask(), ARRIVALS)


@pytest.mark.parametrize(("result", "prefill"), [(1, True), (4, False)])
@pytest.mark.parametrize("ends", [False, True])
def test_a_failed_step_tells_what_it_was(tiny: Tiny, engines: Any, result: int, prefill: bool, ends: bool) -> None:
    engine, device = engines(tiny.folder, overlap=False)
    device.fail_results = {result}
    if ends:
        device.error = RuntimeError("CUDA error: device-side assert triggered")
    engine.loop.add(make_request(0, [1, 2, 3], 9))
    for _ in range(result - 1):
        engine.loop.step()
        assert not engine.loop.last.failed
    with pytest.raises(EngineError) if ends else nullcontext():
        engine.loop.step()
    assert (engine.loop.last.failed, engine.loop.last.prefill) == (True, prefill)
    if not ends:
        engine.loop.step()
        assert (engine.loop.last.failed, engine.loop.last.prefill) == (False, True)  # it is computed again
        while engine.loop.has_work:
            engine.loop.step()


# The engine process; the device breaks at its 20th step, as it would by a kernel that writes where it must not.
PROGRAM = """
import msgspec, sys, torch
from concurrent.futures import Future
from text_generation_inference.config import ServerConfig
from text_generation_inference.engine import process
from text_generation_inference.engine.loop import EngineLoop

launch = EngineLoop.launch
count = 0


def launch_or_break(self):
    global count
    count += 1
    if count == 20 and sys.argv[2] == "cuda":
        numbers = torch.zeros(8, device="cuda")
        numbers[torch.tensor([10**9], device="cuda")] = 1.0
    elif count == 20:
        def fail(plan):
            future = Future()
            future.set_exception(RuntimeError("CUDA error: device-side assert triggered\\nAdvice"))
            return future
        self._runner.launch = fail
    return launch(self)


EngineLoop.launch = launch_or_break
process.run(msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig))
"""


def test_a_broken_device_ends_the_process_in_order(tiny: Tiny, device_name: str, tmp_path_factory: Any) -> None:
    """Clients are told, the exit status says what it was, and nothing hangs on the way out."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "engine.sock"
        command = [sys.executable, "-c", PROGRAM, str(socket), device_name]
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        config = ServerConfig(
            model_id=str(tiny.folder),
            device=device_name,
            dtype="float32",
            max_batch_size=4,
            max_total_tokens=120,
            max_batch_total_tokens=2048,
            disable_grammar_support=True,
            custom_kernels=device_name != "cpu",
            cache_dir=str(tmp_path_factory.mktemp("cache")),
        )
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(config).decode())
        process.stdin.close()
        process.stdin = None
        started = next((line for line in process.stdout if '"started"' in line), "")
        assert started, process.communicate()[1]

        failed_prefills: list[bool] = []

        async def ask_until_it_breaks() -> str:
            client = EngineClient(socket)
            client.on_step_failure = failed_prefills.append
            await client.connect(60)
            assert not client.owes_first_token
            stream = client.submit(make_request(client.next_id(), [1, 2, 3], 100))
            assert client.owes_first_token
            try:
                while True:
                    await stream.take()
            except EngineError as error:
                return str(error)
            finally:
                await client.close()

        text = asyncio.run(asyncio.wait_for(ask_until_it_breaks(), 60))
        _, errors = process.communicate(timeout=60)
    assert text == "a step failed on the device"  # the details are for the log
    assert failed_prefills == [False]
    assert process.returncode == EXIT_ENGINE_FAILED, errors
    assert "engine failed: a step failed on the device: CUDA error: device-side assert" in errors
    assert "Traceback" not in errors
