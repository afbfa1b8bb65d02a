"""`tgi bench offline` as a user has it: a process of its own, on the embedded model and on random weights."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gaudi import STAND_IN
from gaudi_commands import SPAWNED
from gaudi_models import make_model, measure

from bench_samples import TINY_CONFIG
from text_generation_inference.bench.results import Row
from text_generation_inference.bench.work import make_requests

COMMAND = [
    sys.executable,
    "-c",
    "from text_generation_inference.cli import main; import sys; sys.exit(main())",
    "bench",
    "offline",
]


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config without weights."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


def test_the_embedded_model(model_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    settings = ["--device", "cpu", "--json", str(file)]
    done = bench("16/6/1", "24/5/3", *settings, TGI_CACHE_DIR=str(model_cache))
    assert done.returncode == 0, done.stderr
    assert "16/6 x1" in done.stdout and "24/5 x3" in done.stdout
    assert "ready after" in done.stderr and "\x1b" not in done.stderr
    found = json.loads(file.read_text())
    assert found["complete"] and found["model"] == "embedded" and found["hardware"]["device"] == "cpu"
    assert found["versions"]["torch"] and found["ready_seconds"] > 0
    assert found["configuration"]["max_total_tokens"] == 29 + 32 and found["configuration"]["max_batch_size"] == 3
    first, second = found["rows"]
    assert (first["inputs"], first["outputs"], first["requests"]) == (16, 6, 1)
    for row in (first, second):
        new = row["outputs"] * row["requests"]
        assert row["output_tokens_per_s"] == pytest.approx(new / row["seconds"], rel=1e-3)
        total = new + row["inputs"] * row["requests"]
        assert row["total_tokens_per_s"] == pytest.approx(total / row["seconds"], rel=1e-3)
        assert 0 < row["first_token_ms"] <= row["first_token_max_ms"] < 1e3 * row["seconds"]
        assert row["num_steps"] == row["outputs"] and row["num_prefill_steps"] == 1
        assert row["step_rows"] == row["requests"] and 0 < row["host_ms"] < row["step_ms"]
        assert row["peak_memory_gb"] > 0.05 and row["floor_step_ms"] is None


def test_random_weights_and_few_slots(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    settings = ["--load-format", "dummy", "--max-batch-size", "4", "--warmup", "0"]
    done = bench("--model-id", str(tiny), *settings, "--quiet", "--device", "cpu", "--json", str(file), "40/8/9")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (row,) = json.loads(file.read_text())["rows"]
    assert row["step_rows"] == 4  # nine requests went through four slots
    assert row["num_steps"] >= 24


def test_prompts_are_random_and_repeatable() -> None:
    first, again, other = (make_requests(Row(50, 3, 4), 320, seed) for seed in (1, 1, 2))
    assert first == again
    prompts = {tuple(request.token_ids) for request in (*first, *other)}
    assert len(prompts) == 8 and len({request.id for request in (*first, *other)}) == 8
    assert all(5 <= token < 320 for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["500/13/1"], "row 500/13/1 needs 513 tokens"),
        (["16/4/1", "--max-total-tokens", "8"], "less than the longest row needs: 20"),
        (["16/4/1", "--json", "/nowhere/report.json"], "cannot write to /nowhere"),
        (["16/4/1", "--floor"], "about a GPU"),
        (["--profile", "4/16"], "about a GPU"),
        (["16/4/1", "--device", "tpu"], "tpu"),
    ],
)
def test_errors_are_one_line(tiny: Path, arguments: list[str], text: str) -> None:
    done = bench("--model-id", str(tiny), "--load-format", "dummy", "--device", "cpu", "--quiet", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and text in done.stderr


def test_what_needs_a_gpu_is_told_before_a_model_is_looked_for() -> None:
    done = bench("--model-id", "/nowhere/model", "--device", "cpu", "--floor", "1/1/1")
    assert done.returncode == 1 and "about a GPU" in done.stderr


def test_a_missing_model() -> None:
    done = bench("--model-id", "/nowhere/model", "1/1/1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "/nowhere/model" in done.stderr


def test_ctrl_c_shows_what_was_measured(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    rows = ["8/4/2", "8/500/8000"]  # the second would take minutes
    command = [
        *COMMAND,
        "--model-id",
        str(tiny),
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--json",
        str(file),
        *rows,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("8/4 x2:"):
            break
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "8/4 x2" in out and "500" not in out
    assert "1 of 2 rows" in told and "Traceback" not in told
    found = json.loads(file.read_text())
    assert not found["complete"] and len(found["rows"]) == 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model with a head for each card, and the file that QUANT_CONFIG names."""
    folder = tmp_path_factory.mktemp("measured")
    model = make_model("Llama", folder / "llama", is_split=True)
    return model, measure("Llama", model, folder)


@pytest.mark.parametrize(
    ("place", "inputs", "outputs", "batch"), [(0, 16, 16, 8), (1, 16, 32, 6), (2, 64, 16, 4), (3, 64, 32, 3)]
)
def test_published_rows_of_several_cards(
    measured: tuple[Path, str], place: int, inputs: int, outputs: int, batch: int
) -> None:
    """The four published lines of gaudi_spawn with their own flags, lengths and batches aside, on the stand-in, whose
    speed says nothing: nothing is timed there."""
    model, quant_config = measured
    emulated = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    row = SPAWNED[place]
    words = [*row.words(str(model), inputs, outputs, batch), "--device", "hpu", "--dry-run", "--quiet"]
    given = {"QUANT_CONFIG": quant_config, "TQDM_DISABLE": "1", "PYTHONPATH": emulated, "PT_HPU_LAZY_MODE": "1"}
    done = bench(*words, **given, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    tokens = outputs * batch
    assert done.stdout == f"{inputs}/{outputs} x{batch}: {tokens} tokens on hpu (emulated), not timed\n"
    if row.cards == 4:  # the file is read
        missing = bench(*words, **{**given, "QUANT_CONFIG": f"{quant_config}.not"})
        assert missing.returncode == 1 and "maxabs_quant.json.not" in missing.stderr


def test_a_published_command_line(tmp_path: Path) -> None:
    """One row, three whole warm-ups cut to one, the formula, the file, what each flag did."""
    line = "--batch_size 2 --max_input_tokens 16 --max_new_tokens 4 --warmup 1 --n_iterations 2 --trim_logits"
    done = bench(*line.split(), "--bucket_size", "128", "--output_dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    rate = re.search(r"Throughput = 2 iterations x 2 requests x 4 new tokens / ([0-9.]+) s = ([0-9.]+)", done.stdout)
    assert rate is not None, done.stdout
    assert float(rate[2]) == pytest.approx(16 / float(rate[1]), rel=0.01)
    assert "--trim_logits: no effect: it is always so" in done.stderr
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    row = report["rows"][0]
    assert (row["iterations"], row["requests"], row["outputs"]) == (2, 2, 4)
