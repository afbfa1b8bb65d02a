"""Parts of `tgi bench offline` that need no engine: flags, rows, tables, and what is made of a trace."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from text_generation_inference.bench.command import main
from text_generation_inference.bench.floor import FloorModel, find_rates
from text_generation_inference.bench.offline import choose_rows, find_lack, make_config
from text_generation_inference.bench.offline_command import read_task
from text_generation_inference.bench.offline_tables import rows_table
from text_generation_inference.bench.presets import PRESETS
from text_generation_inference.bench.report import check_writable
from text_generation_inference.bench.results import Published, Row, RowResult, parse_row
from text_generation_inference.bench.row_progress import RowProgress, describe_seconds, draw_bar
from text_generation_inference.bench.shapes import SHAPES, config_of, write_shape
from text_generation_inference.bench.step_profile import find_steps, kind_of, summarise
from text_generation_inference.bench.tables import markdown
from text_generation_inference.bench.work import Iteration, StepTime
from text_generation_inference.bench.work import summarise as summarise_row
from text_generation_inference.config import Resolved
from text_generation_inference.errors import StartError
from text_generation_inference.layers.cache import CacheSpec
from text_generation_inference.models.registry import build, read_config


@pytest.mark.parametrize(
    "text", ["", "1/2", "1/2/3/4", "0/1/1", "1/0/1", "1/1/0", "-1/2/3", "a/b/c", "1/2/3 ", "٣/1/1"]
)
def test_a_malformed_row_is_refused(text: str) -> None:
    with pytest.raises(StartError, match="IN/OUT/REQUESTS"):
        parse_row(text)


def test_rows() -> None:
    row = parse_row("200/800/64")
    assert row == Row(200, 800, 64)
    assert row.length == 1000
    assert str(row) == "200/800 x64"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1/2"], "row '1/2'"),
        (["--shape", "llama-3.1-8b", "--model-id", "embedded"], "leave one out"),
        (["--shape", "llama-3.1-8b", "--load-format", "safetensors"], "no weights of its own"),
        (["--shape", "llama-9"], "llama-9"),
        (["--warmup", "-1"], "--warmup"),
        (["--iterations", "0"], "--iterations must be >= 1"),
        (["--preset", "gaudi9"], "gaudi9"),
        (["--preset", "gaudi2-small", "1/1/1"], "has rows of its own"),
        (["--preset", "gaudi2-small", "--shape", "llama-2-7b"], "names a model itself"),
        (["--profile", "256"], "ROWS/CONTEXT"),
        (["--profile", "0/5"], "ROWS/CONTEXT"),
        (["--profile", "prompts:5"], "prompts:ROWS/TOKENS"),
        (["--max-batch-size", "many"], "--max-batch-size 'many'"),
        (["--max-batch-size", "0"], "`max_batch_size` must be > 0"),
        (["--cuda-memory-fraction", "2"], "`cuda_memory_fraction`"),
        (["--dtype", "int3"], "`dtype`"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_mistakes_are_told_at_once(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offline", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and text in told


def test_without_a_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "say what to measure: tgi bench offline, serve, report" in capsys.readouterr().err
    assert main(["online"]) == 2
    assert "'online' is not a benchmark: tgi bench offline" in capsys.readouterr().err
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in ("offline", "serve", "report"))


@pytest.mark.parametrize("name", ["offline", "serve", "report"])
def test_every_benchmark_helps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0 and f"usage: tgi bench {name} " in capsys.readouterr().out


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGI_DEVICE", "cpu")
    monkeypatch.setenv("DTYPE", "float16")
    flags = "--shape mistral-7b --dtype bfloat16 32/4/1 --cuda-graphs 0 --profile 8/64 --profile prompts:2/999"
    task = read_task(["16/8/2", *flags.split()])
    assert task.rows == [Row(16, 8, 2), Row(32, 4, 1)]
    assert task.settings == {
        "device": "cpu",
        "dtype": "bfloat16",
        "cuda_graphs": [0],
        "prefix_caching": False,
        "load_format": "dummy",
    }
    assert task.profiles == [(8, 64, False), (2, 999, True)]
    assert read_task([]).rows
    assert read_task(["--prefix-caching"]).settings["prefix_caching"] is True


def test_presets() -> None:
    task = read_task(["--preset", "gaudi2-llama-2-7b"])
    assert task.shape == "llama-2-7b" and task.iterations == 5
    assert task.settings["quantize"] == "fp8" and task.settings["kv_cache_dtype"] == "fp8_e4m3fn"
    assert task.rows[0] == Row(128, 128, 1230)
    assert task.published[task.rows[3]] == Published("Llama-2-7B FP8", "Gaudi 2", 1, 1943)
    task = read_task(["--preset", "gaudi2-llama-2-7b", "--iterations", "2", "--model-id", "/models/llama"])
    assert task.shape is None and task.iterations == 2 and task.settings["model_id"] == "/models/llama"
    assert "load_format" not in task.settings
    assert read_task(["--preset", "gaudi2-small"]).settings == {"prefix_caching": False}
    assert read_task([]).iterations == 1 and read_task([]).published == {}


def test_the_published_rows() -> None:
    """Seconds of an iteration that the figures imply, as the reference lists them."""
    implied = [
        round(found.row.requests * found.row.outputs / found.published.output_tokens_per_s, 1)
        for preset in PRESETS.values()
        for found in preset.rows
        if found.published
    ]
    assert implied == [12.0, 69.9, 9.3, 85.4, 82.1, 207.0, 44.1, 166.7, 8.7, 30.9, 11.3, 28.7]
    for name, preset in PRESETS.items():
        assert preset.shape is None or preset.shape in SHAPES
        assert read_task(["--preset", name]).rows == [found.row for found in preset.rows]


def test_rows_that_do_not_fit() -> None:
    task = read_task(["--preset", "gaudi2-llama-2-7b"])
    rows, skipped = choose_rows(task, 4095)
    assert len(rows) == 3 and skipped[0].reason == "needs 4,096 positions, the model has 4,095"
    assert make_config(task, rows, "m", 4095).max_total_tokens == 2176 + 32
    with pytest.raises(StartError, match="no row of gaudi2-llama-2-7b fits into the model's 100 positions"):
        choose_rows(task, 100)
    given = read_task(["4000/1000/1"])
    assert choose_rows(given, 4096) == (given.rows, [])
    with pytest.raises(StartError, match="needs 5000 tokens"):
        make_config(given, given.rows, "m", 4096)
    engine = Resolved(
        block_size=16,
        num_blocks=1 + 100,
        max_input_tokens=64,
        max_total_tokens=64,
        max_batch_prefill_tokens=64,
        max_batch_size=50,
        reasons={},
    )
    assert find_lack(Row(16, 16, 50), engine) is None
    assert find_lack(Row(17, 16, 50), engine) == "needs a KV cache of 2,400 tokens, 1,600 fit into the memory"
    windowed = msgspec.structs.replace(engine, window=17)
    assert find_lack(Row(40, 16, 33), windowed) is None
    assert find_lack(Row(40, 16, 34), windowed) == "needs a KV cache of 1,632 tokens, 1,600 fit into the memory"
    assert find_lack(Row(1, 1, 51), engine) == "51 requests at a time, 50 are possible"


def test_a_shape_beyond_all_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything is allocated."""
    monkeypatch.setitem(SHAPES, "huge", {**SHAPES["llama-2-7b"], "intermediate_size": 2**22})
    assert main(["offline", "--shape", "huge", "--device", "cpu", "--quiet", "1/1/1"]) == 1
    told = capsys.readouterr().err
    assert "The model is too large: its weights take 66" in told and told.count("\n") == 1


def test_iterations_are_summed() -> None:
    one = Iteration(2.0, [0.1, 0.3], [StepTime(0.010, 0.001, 2), StepTime(0.030, 0.003, 1)], 20, 11, 1, 0)
    two = Iteration(3.0, [0.2, 0.4], [StepTime(0.020, 0.002, 2)], 20, 12, 2, 3)
    result = summarise_row(Row(50, 10, 2), [one, two])
    assert result.iterations == 2 and result.iteration_seconds == [2.0, 3.0] and result.seconds == 5.0
    assert result.output_tokens_per_s == 2 * 2 * 10 / 5.0
    assert result.total_tokens_per_s == 2 * 2 * 60 / 5.0
    assert result.step_ms == pytest.approx(15.0) and result.host_ms == pytest.approx(1.5) and result.step_rows == 2
    assert result.first_token_ms == pytest.approx(250.0) and result.first_token_max_ms == 400.0
    assert (result.num_steps, result.num_prefill_steps, result.num_preemptions) == (23, 3, 3)


def test_time_left() -> None:
    now = 100.0
    progress = RowProgress(Row(10, 50, 4), 3, "row 1 of 2", clock=lambda: now)
    progress.start_iteration()
    assert progress.seconds_left() is None
    now = 110.0  # prompts took ten seconds
    progress.tell(4)
    assert progress.describe(bar=False) == "10/50 x4 (row 1 of 2): 4 of 600 tokens (1%)"
    now = 112.0
    progress.tell(104)  # 50 tokens a second
    left = 96 / 50
    assert progress.seconds_left() == pytest.approx(left + 2 * (12 + left))
    now = 114.0
    progress.start_iteration()
    assert progress.seconds_left() == pytest.approx(28.0)
    now = 121.0
    progress.tell(100)
    assert progress.seconds_left() == pytest.approx(21.0)
    assert progress.describe(bar=False) == "10/50 x4 (row 1 of 2): 300 of 600 tokens (50%), 0:21 left"
    assert "━━━━━━━━━━··········" in progress.describe(bar=True)


def test_words_for_time() -> None:
    assert [describe_seconds(seconds) for seconds in (0.2, 59.6, 61, 3599, 3600, 90061)] == [
        "0:00",
        "1:00",
        "1:01",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]
    assert draw_bar(0.0) == "·" * 20 and draw_bar(1.0) == "━" * 20


def test_unwritable_reports(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "report.json"))
    with pytest.raises(StartError, match="is a folder"):
        check_writable(str(tmp_path))
    with pytest.raises(StartError, match="cannot write"):
        check_writable(str(tmp_path / "missing" / "report.json"))
    with pytest.raises(StartError, match="--output "):
        check_writable(str(tmp_path), "--output")


@pytest.mark.parametrize("shape", list(SHAPES))
def test_shapes_are_models(shape: str, tmp_path: Path) -> None:
    model = build(read_config(write_shape(shape, tmp_path / shape)))
    caches, fields = model.caches(torch.bfloat16), config_of(shape)
    assert len(caches) == fields["num_hidden_layers"]
    width = fields["kv_lora_rank"] + fields["qk_rope_head_dim"] if "kv_lora_rank" in fields else fields["head_dim"]
    assert caches[0].shapes[0][1] == width


def test_tables() -> None:
    assert markdown(["a", "b"], [["x", "10"]]).split("\n") == ["| a |  b |", "| : | -: |", "| x | 10 |"]
    values = dict.fromkeys(RowResult.__struct_fields__, 1.0)
    theirs = Published("Llama-2-70B FP8", "Gaudi 2", 2, 2727)
    fields = {"inputs": 200, "outputs": 800, "requests": 64, "step_ms": None, "of_floor": 0.9, "published": theirs}
    row = RowResult(**{**values, **fields})
    table = rows_table([row])
    assert "published: Llama-2-70B FP8 on Gaudi 2" in table and "2,727 (2 cards)" in table
    assert "200/800 x64" in table and "90.0%" in table
    assert len({line.count("|") for line in table.split("\n")}) == 1
    row.floor_step_ms = row.floor_tokens_per_s = row.of_floor = row.published = None
    assert "floor" not in rows_table([row]) and "published" not in rows_table([row])


def test_age_of_the_process() -> None:
    program = "import time; time.sleep(0.3); from text_generation_inference.bench.report import *; print(seconds_since_process_start())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert 0.3 <= float(done.stdout) < 60


def traced_steps(num_steps: int) -> list[tuple[float, float, str]]:
    """Steps of 100 us: a first kernel of 10, a gap of 5, two products of 30 that overlap by 10, 35 of nothing."""
    events = []
    for step in range(num_steps):
        at = 1000.0 + 100 * step
        events += [(at, at + 10, "gather"), (at + 15, at + 45, "nvjet_tst"), (at + 35, at + 65, "nvjet_tst")]
    return events


def test_a_trace_taken_apart() -> None:
    profile = summarise(traced_steps(6)[::-1], 8, 64, 0.00012)
    assert profile.wall_ms == pytest.approx(0.12)
    assert profile.traced_ms == pytest.approx(0.1)
    assert profile.kernel_ms == pytest.approx(0.07)
    assert profile.busy_ms == pytest.approx(0.06)
    assert profile.gap_ms == pytest.approx(0.04)
    assert profile.by_kind == {"products": pytest.approx(0.06), "other": pytest.approx(0.01)}
    assert [(kernel.name, kernel.calls) for kernel in profile.kernels] == [("nvjet_tst", 2), ("gather", 1)]


def test_a_trace_of_prompts() -> None:
    """All of it is one span, whatever steps it has."""
    profile = summarise(traced_steps(2)[::-1], 3, 1000, 0.5, prompts=True)
    assert profile.title == "3 prompts of 1,000 tokens" and profile.time == "500.000 ms to the last result"
    assert profile.kernel_ms == pytest.approx(2 * 0.07) and profile.busy_ms == pytest.approx(2 * 0.06)
    assert profile.traced_ms == pytest.approx(profile.busy_ms + profile.gap_ms)
    assert [(kernel.name, kernel.calls) for kernel in profile.kernels] == [("nvjet_tst", 4), ("gather", 2)]
    assert summarise([], 1, 1, 0.0, prompts=True).traced_ms == 0


def test_steps_of_a_trace() -> None:
    events = [*traced_steps(7), (999.0, 999.5, "once")]
    assert find_steps(sorted(events)) == [1000.0 + 100 * step for step in range(7)]
    assert find_steps([]) == []
    assert summarise([], 1, 1, 0.0).kernels == []


def test_kinds_of_kernels() -> None:
    assert kind_of("_decode_attention_kernel") == "attention"
    assert kind_of("sm90_xmma_gemm_bf16") == "products"
    assert kind_of("Memcpy DtoH (Device -> Pinned)") == "copies"
    assert kind_of("_rms_norm_kernel") == "other"


def test_floor_arithmetic() -> None:
    caches = [CacheSpec(2, 16, torch.bfloat16), CacheSpec(2, 16, torch.bfloat16, window=10)]
    matrices = [torch.zeros(32, 64), torch.zeros(64, 16)]
    model = FloorModel(caches, 2 * 4 * 16, matrices, torch.zeros(100, 64), find_rates("NVIDIA H200"))
    assert model.cache_bytes(100) == 2 * 2 * 16 * 2 * (100 + 10)
    operations = 2 * (32 * 64 + 64 * 16) + 2 * 50 * 4 * 16 * 2
    assert model.prefill_seconds(Row(50, 5, 3)) == pytest.approx(150 * operations / 750e12)
    fp8 = FloorModel(
        caches, 128, [matrix.to(torch.float8_e4m3fn) for matrix in matrices], torch.zeros(100, 64), model.rates
    )
    assert fp8.prefill_seconds(Row(50, 5, 3)) == pytest.approx(150 * operations / 1300e12)


def test_the_floor_of_a_card_that_nobody_measured() -> None:
    with pytest.raises(StartError, match="the rates of NVIDIA L4 are unknown; they were measured on NVIDIA H200"):
        find_rates("NVIDIA L4")
