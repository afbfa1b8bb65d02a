"""Parts of `tgi bench offline` that need no engine: flags, rows, tables, and what is made of a trace."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tgi.bench.command import main, read_task
from tgi.bench.floor import FloorModel
from tgi.bench.report import check_writable, markdown, rows_table
from tgi.bench.results import Row, RowResult, parse_row
from tgi.bench.shapes import SHAPES, config_of, write_shape
from tgi.bench.step_profile import find_steps, kind_of, summarise
from tgi.errors import StartError
from tgi.layers.rotary import RopeSpec
from tgi.models.registry import read_config, read_spec
from tgi.models.spec import DecoderSpec


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
        (["--profile", "256"], "ROWS/CONTEXT"),
        (["--profile", "0/5"], "ROWS/CONTEXT"),
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
    assert main(["online"]) == 2
    assert "tgi bench offline" in capsys.readouterr().err
    assert main(["--help"]) == 0


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGI_DEVICE", "cpu")
    monkeypatch.setenv("DTYPE", "float16")
    task = read_task(
        ["16/8/2", "--shape", "mistral-7b", "--dtype", "bfloat16", "32/4/1", "--cuda-graphs", "0", "--profile", "8/64"]
    )
    assert task.rows == [Row(16, 8, 2), Row(32, 4, 1)]
    assert task.settings == {
        "device": "cpu",
        "dtype": "bfloat16",
        "cuda_graphs": [0],
        "prefix_caching": False,
        "load_format": "dummy",
    }
    assert task.profile == (8, 64)
    assert read_task([]).rows
    assert read_task(["--prefix-caching"]).settings["prefix_caching"] is True


def test_unwritable_reports(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "report.json"))
    with pytest.raises(StartError, match="is a folder"):
        check_writable(str(tmp_path))
    with pytest.raises(StartError, match="cannot write"):
        check_writable(str(tmp_path / "missing" / "report.json"))


@pytest.mark.parametrize("shape", list(SHAPES))
def test_shapes_are_models(shape: str, tmp_path: Path) -> None:
    spec = read_spec(read_config(write_shape(shape, tmp_path / shape)))
    assert spec.num_layers == SHAPES[shape]["num_hidden_layers"]
    assert spec.head_dim * spec.num_heads == config_of(shape)["hidden_size"]


def test_tables() -> None:
    assert markdown(["a", "b"], [["x", "10"]]).split("\n") == ["| a |  b |", "| : | -: |", "| x | 10 |"]
    values = dict.fromkeys(RowResult.__struct_fields__, 1.0)
    row = RowResult(**{**values, "inputs": 200, "outputs": 800, "requests": 64, "step_ms": None, "of_floor": 0.9})
    table = rows_table([row])
    assert "200/800 x64" in table and "90.0%" in table
    assert len({line.count("|") for line in table.split("\n")}) == 1
    row.floor_step_ms = None
    assert "floor" not in rows_table([row])


def test_age_of_the_process() -> None:
    program = "import time; time.sleep(0.3); from tgi.bench.report import *; print(seconds_since_process_start())"
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
    spec = DecoderSpec(
        vocab_size=100,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        norm_eps=1e-5,
        rope=RopeSpec(kind="default", theta=1e4, rotary_dim=16),
        max_positions=512,
        windows=(None, 10),
    )
    matrices = [torch.zeros(32, 64), torch.zeros(64, 16)]
    model = FloorModel(spec, matrices, torch.zeros(100, 64), cache_element_bytes=2)
    assert model.cache_bytes(100) == 2 * 2 * 16 * 2 * (100 + 10)
    operations = 2 * (32 * 64 + 64 * 16) + 2 * 50 * 4 * 16 * 2
    assert model.prefill_seconds(Row(50, 5, 3)) == pytest.approx(150 * operations / 750e12)
    eight_bits = FloorModel(spec, [matrix.to(torch.float8_e4m3fn) for matrix in matrices], torch.zeros(100, 64), 1)
    assert eight_bits.prefill_seconds(Row(50, 5, 3)) == pytest.approx(150 * operations / 1300e12)
