"""What happens before the first request on a device whose memory is measured."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from driving import Tiny, make_request, make_tiny, random_prompts, reference, run, start
from queue_on_cpu import QueueOnCpu

from text_generation_inference.config import ServerConfig
from text_generation_inference.engine.build import start_engine
from text_generation_inference.errors import ResourceError, StartError
from text_generation_inference.layers.cache import bytes_per_token


class Measured(QueueOnCpu):
    """Counts what is looked up at a time in place of bytes."""

    description = "a test (capability 8.0)"
    supports_fp8 = False
    fp8_needs = "a GPU of compute capability 8.9"

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.limits = msgspec.structs.replace(self.limits, measures_steps=True, meters_memory=True)
        self.tokens_per_step: list[int] = []
        self.free, self.peak, self.compiled = 10**9, 1000, 0
        self.room = 10**9  # tokens
        embedding = self.ops.embedding

        def look_up(ids: torch.Tensor, weight: Any) -> Any:
            self.tokens_per_step.append(ids.shape[0])
            if ids.shape[0] > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried")
            return embedding(ids, weight)

        self.ops.embedding = look_up

    def free_bytes(self) -> int:
        return self.free

    def compiling(self) -> AbstractContextManager[Any]:
        self.compiled += 1
        return nullcontext()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self.peak


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Llama", {}, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def device(device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    if device_name != "cpu":
        pytest.skip("with a device double")
    device = Measured(tmp_path)
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    return device


@pytest.mark.parametrize(("rows", "tokens"), [(11, 33), (1, 16), (40, 300), (2, 1)])
def test_it_plays_the_largest_step_and_leaves_nothing(tiny: Tiny, device: Measured, rows: int, tokens: int) -> None:
    stages: list[str] = []
    config = ServerConfig(
        model_id=str(tiny.folder),
        dtype="float32",
        max_batch_size=rows,
        max_batch_prefill_tokens=tokens,
        max_total_tokens=120,
        max_batch_total_tokens=2048,
    )
    engine = start_engine(config, lambda stage, *_: stages.append(stage))
    assert max(device.tokens_per_step) == max(rows, tokens)
    assert device.compiled == 1
    assert stages[0] == "load weights" and "compile kernels" in stages and stages[-1] == "warm up shapes"
    asked = [make_request(n, prompt, 9) for n, prompt in enumerate(random_prompts(320, [3, 20, 50], seed=4))]
    ours = run(engine, asked)
    engine.close()
    assert max(device.tokens_per_step) == max(rows, tokens)
    assert [output.token_ids for output in ours] == [reference(tiny.model, r.token_ids, 9)[0] for r in asked]


def test_the_cache_gets_what_steps_do_not_need(tiny: Tiny, device: Measured) -> None:
    settings: dict[str, Any] = {"max_batch_size": 4, "max_total_tokens": 512, "max_batch_total_tokens": None}
    per_token = start(tiny.folder, **{**settings, "max_total_tokens": 64}).facts.num_blocks
    assert per_token == 4 * (64 // 16 + 1) + 1  # memory abounds: one to spare for each, and nobody's
    device.free, device.peak = 2_000_000, 200_000
    engine = start(tiny.folder, **settings)
    kv = bytes_per_token(engine.rank.runner.model.caches(torch.float32))
    share = device.limits.memory_share
    assert engine.facts.num_blocks - 1 == int((2_000_000 - 3.5 * 200_000) * share) // kv // 16


class Crowded(Measured):
    """Has room for the largest step only beside so many blocks."""

    most_blocks = 10**9
    num_forgotten = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.room = 10**9 if shape[0] <= self.most_blocks else 160
        return super().zeros(shape, dtype)

    def forget_captures(self) -> None:
        self.num_forgotten += 1


@pytest.mark.parametrize(("lacking", "tries"), [(0, 0), (150_000, 2), (10**6, 4)])
def test_the_cache_leaves_room_for_the_largest_step_beside_it(
    tiny: Tiny, device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int, tries: int
) -> None:
    """What was measured without a cache fails beside it, until the cache is smaller."""
    if device_name != "cpu":
        pytest.skip("with a device double")
    device = Crowded(tmp_path)
    device.free, device.peak = 2_000_000, 200_000
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    monkeypatch.setattr("text_generation_inference.engine.build.SPARE_BYTES", 100_000)
    monkeypatch.setattr("text_generation_inference.engine.build.MOST_SPARE_BYTES", 400_000)
    settings: dict[str, Any] = {"max_batch_size": 4, "max_total_tokens": 512, "max_batch_total_tokens": None}
    whole = start(tiny.folder, **settings).facts.num_blocks
    spec = tiny.model.config
    head_dim = spec.hidden_size // spec.num_attention_heads
    block_bytes = 2 * spec.num_hidden_layers * spec.num_key_value_heads * head_dim * 4 * device.limits.block_size
    share = device.limits.memory_share
    device.most_blocks = whole - int(lacking * share / block_bytes)
    engine = start(tiny.folder, max_batch_prefill_tokens=200, **settings)
    assert device.num_forgotten == tries
    assert (engine.facts.num_blocks <= device.most_blocks) == (tries < 4)  # then steps are cut as memory lacks
    assert abs(whole - engine.facts.num_blocks - int(tries * 100_000 * share / block_bytes)) <= 1
    assert any("less for the KV cache" in note for note in engine.notes) == (tries > 0)
    asked = [make_request(n, prompt, 9) for n, prompt in enumerate(random_prompts(320, [3, 20, 50], seed=4))]
    assert [output.token_ids for output in run(engine, asked)] == [
        reference(tiny.model, request.token_ids, 9)[0] for request in asked
    ]
    engine.close()


class CrowdedGraphs(Measured):
    """Lacks memory for the captures of large steps, beside more than so many blocks."""

    most_blocks = 0
    num_blocks = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_blocks = shape[0]
        return super().zeros(shape, dtype)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        replay, result = super().capture(work)
        if result.shape[0] >= 4 and self.num_blocks > self.most_blocks:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return replay, result


@pytest.mark.parametrize("finds_room", [True, False])
def test_what_cannot_be_captured_is_not(
    tiny: Tiny, device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finds_room: bool
) -> None:
    """A smaller cache is tried first; then such steps run op by op, and the start goes on."""
    if device_name != "cpu":
        pytest.skip("with a device double")
    device = CrowdedGraphs(tmp_path)
    device.free, device.peak = 2_000_000, 200_000
    monkeypatch.setattr("text_generation_inference.engine.rank.choose_device", lambda *_: device)
    monkeypatch.setattr("text_generation_inference.engine.build.SPARE_BYTES", 100_000)
    monkeypatch.setattr("text_generation_inference.engine.build.MOST_SPARE_BYTES", 200_000)
    settings: dict[str, Any] = {"max_batch_size": 4, "max_total_tokens": 512, "max_batch_total_tokens": None}
    device.most_blocks = 10**9
    whole = start(tiny.folder, **settings)
    num_shapes = len(whole.rank.runner.steps.plan.shapes)
    assert whole.rank.runner.steps.num_captured == num_shapes
    device.most_blocks = whole.facts.num_blocks - 1 if finds_room else 0
    engine = start(tiny.folder, **settings)
    assert engine.facts.num_blocks < whole.facts.num_blocks
    steps = engine.rank.runner.steps
    told = [note for note in engine.notes if "have no graph" in note]
    if finds_room:
        assert steps.num_captured == num_shapes and told == []
    else:
        captured = [bucket for bucket in steps.plan.shapes if steps.captures(bucket)]
        assert {(bucket.phase, bucket.batch) for bucket in captured} == {("decode", 1), ("decode", 2)}
        assert steps.num_captured == 2
        assert told == [f"{num_shapes - 2} of {num_shapes} shapes have no graph: there was not enough memory for them"]
    asked = [make_request(n, prompt, 9) for n, prompt in enumerate(random_prompts(320, [3, 20, 50, 9], seed=4))]
    replays = device.num_replays
    assert [output.token_ids for output in run(engine, asked)] == [
        reference(tiny.model, request.token_ids, 9)[0] for request in asked
    ]
    assert device.num_replays > replays or not finds_room
    engine.close()


def test_a_step_that_cannot_fit_is_told_at_the_start(tiny: Tiny, device: Measured) -> None:
    device.room = 20
    with pytest.raises(ResourceError, match=r"step of 64 tokens and 4 requests.*lower `max_batch_prefill_tokens`"):
        start(tiny.folder, max_batch_size=4, max_batch_prefill_tokens=64)


def test_a_model_that_is_too_large_is_told_before_loading(tiny: Tiny, device: Measured) -> None:
    device.free = 100_000
    with pytest.raises(ResourceError) as error:
        start(tiny.folder, max_batch_size=4, cuda_memory_fraction=0.5)
    assert "The model is too large: its weights take" in str(error.value)
    assert "a `cuda_memory_fraction` above 0.5, a GPU with more memory" in str(error.value)
    assert "fp8" not in str(error.value)  # it cannot
    assert device.tokens_per_step == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantize": "fp8", "dtype": None}, "`quantize` fp8"),
        ({"kv_cache_dtype": "fp8_e4m3fn"}, "`kv_cache_dtype` fp8"),
    ],
)
def test_fp8_on_a_gpu_without_it(tiny: Tiny, device: Measured, settings: dict, named: str) -> None:
    with pytest.raises(StartError, match=f"{named}.* needs a GPU of compute capability 8.9.*not a test"):
        start(tiny.folder, max_batch_size=4, **settings)


PROGRAM = """
import json, sys, time
from pathlib import Path
import msgspec
import torch
from triton.backends.compiler import GPUTarget
from triton import knobs
from triton.runtime import driver, jit


class NoCard:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")


driver.set_active(NoCard())
from queue_on_cpu import QueueOnCpu
from text_generation_inference.kernels.triton.compile_ahead import compile_only
from text_generation_inference.kernels.triton.compile_workers import Workers
from text_generation_inference.kernels.triton.ops import load_ops
from driving import start
import text_generation_inference.engine.rank


class OnlyCompiles(QueueOnCpu):
    cache_by_head = True
    def compiling(self): return compile_only(2, Workers(1), load=False)
    def peak_bytes(self, work):
        assert not compiled_here, compiled_here
        names = {}
        for function in functions:
            for ready, *_ in function.device_caches.values():
                assert all(type(kernel).__name__ == "CompiledKernel" for kernel in ready.values()), ready
                assert all(kernel.metadata.shared <= 99 * 1024 for kernel in ready.values()), function
                names[function.__name__] = len(ready)
        print(json.dumps(names))
        sys.exit(0)


compiled_here = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled_here.append(src.name)
functions = []
init = jit.JITFunction.__init__
def remember(self, *arguments, **options):
    init(self, *arguments, **options)
    functions.append(self)
jit.JITFunction.__init__ = remember
device = OnlyCompiles(Path(sys.argv[2]), load_ops(132))
device.limits = msgspec.structs.replace(device.limits, measures_steps=True)
text_generation_inference.engine.rank.choose_device = lambda *_: device
start(Path(sys.argv[1]), max_batch_size=40, max_batch_prefill_tokens=64, max_total_tokens=120)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_dry_run_compiles_every_kernel_of_a_step(tiny: Tiny, tmp_path: Path, device_name: str) -> None:
    """For Hopper, without a card."""
    if device_name != "cpu":
        pytest.skip("every other test does that")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", PROGRAM, str(tiny.folder), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    parts = "norm gate rotary decode prefill inputs write best join look draw count bound collect thresholds copy tally bias"
    for part_of_a_name in (*parts.split(), "penalise"):
        assert any(part_of_a_name in name for name in compiled), compiled


ASKS_EARLY = (
    PROGRAM.split("from queue_on_cpu")[0]
    + """
from contextlib import contextmanager
from queue_on_cpu import QueueOnCpu
from text_generation_inference.kernels.triton.compile_ahead import Zeroes, begin_only
from text_generation_inference.kernels.triton.ops import load_ops, specialised
from driving import start
import text_generation_inference.engine.rank


class Asked:
    def __init__(self): self.kernels = []
    def begin(self, described): self.kernels.append(described)


class OnlyAsks(QueueOnCpu):
    cache_by_head = True
    early, later = Asked(), Asked()
    def begin_compiling(self, work):
        with begin_only(self.early): work()
    @contextmanager
    def compiling(self):
        with begin_only(self.later), Zeroes(): yield
    def peak_bytes(self, work):
        print(json.dumps([self.early.kernels, self.later.kernels]))
        sys.exit(0)


device = OnlyAsks(Path(sys.argv[2]), load_ops(132))
device.ops.attention.specialised, device.ops.attention.bulk_copies = specialised((9, 0)), True
device.limits = msgspec.structs.replace(device.limits, measures_steps=True)
text_generation_inference.engine.rank.choose_device = lambda *_: device
long = dict(max_batch_prefill_tokens=2048, max_total_tokens=2048)
start(Path(sys.argv[1]), dtype="bfloat16", max_batch_size=4, **long)
"""
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_of_long_prompts_is_asked_for_before_weights_are_loaded(tmp_path: Path, device_name: str) -> None:
    """Under the very description that steps ask for it later: else it would be compiled twice."""
    if device_name != "cpu":
        pytest.skip("needs no card")
    heads = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    folder = make_tiny("Llama", {**heads, "max_position_embeddings": 4096}, tmp_path / "model").folder
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", ASKS_EARLY, str(folder), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    early, later = json.loads(done.stdout.splitlines()[-1])
    assert [json.loads(asked)["name"].split(".")[-1] for asked in early] == ["prefill_warp_specialised"]
    assert set(early) < set(later)
