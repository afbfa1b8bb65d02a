"""The published command lines of run_generation are accepted by `tgi bench offline`, and mean there what it says."""

import re
import subprocess
import sys
from typing import Any

import pytest

from text_generation_inference.bench.generation_flags import NAMES, describe_throughput
from text_generation_inference.bench.offline_command import OfflineTask, read_task
from text_generation_inference.bench.presets import PRESETS
from text_generation_inference.bench.results import Row, RowResult
from text_generation_inference.errors import StartError

# The flags of the published table; in/out, cards and batch come with each row.
LLAMA = (
    "--bf16 --attn_softmax_bf16 --use_hpu_graphs --limit_hpu_graphs --trim_logits --use_kv_cache --bucket_size=128"
    " --bucket_internal --use_flash_attention --flash_attention_recompute"
)
MISTRAL = (
    "--bf16 --attn_softmax_bf16 --use_hpu_graphs --limit_hpu_graphs --trim_logits --use_kv_cache --reuse_cache"
    " --bucket_size 128"
)
PUBLISHED = {"gaudi2-llama-2-7b": LLAMA, "gaudi2-llama-2-70b": f"{LLAMA} --disk_offload", "gaudi2-mistral-7b": MISTRAL}
# Every flag of section 8.1, and those of gaudi_spawn.
REFERENCE = [
    "world_size",
    "use_deepspeed",
    "use_mpi",
    "model_name_or_path",
    "bf16",
    "batch_size",
    "max_input_tokens",
    "max_new_tokens",
    "n_iterations",
    "use_kv_cache",
    "use_hpu_graphs",
    "limit_hpu_graphs",
    "bucket_size",
    "bucket_internal",
    "reuse_cache",
    "trim_logits",
    "attn_softmax_bf16",
    "use_flash_attention",
    "flash_attention_recompute",
    "flash_attention_causal_mask",
    "flash_attention_fast_softmax",
    "disk_offload",
    "const_serialization_path",
    "ignore_eos",
    "no-ignore_eos",
    "do_sample",
    "num_beams",
    "top_k",
    "top_p",
    "temperature",
    "penalty_alpha",
    "bad_words",
    "force_words",
    "num_return_sequences",
    "prompt",
    "dataset_name",
    "column_name",
    "dataset_max_samples",
    "book_source",
    "mlcommons_dataset",
    "torch_compile",
    "regional_compile",
    "force_static_compile",
    "cache_size_limit",
    "profiling_warmup_steps",
    "profiling_steps",
    "profiling_record_shapes",
    "profile_whole_sequences",
    "simulate_dyn_prompt",
    "reduce_recompile",
    "fp8",
    "output_dir",
    "verbose_workers",
    "show_graphs_count",
    "attn_batch_split",
    "parallel_strategy",
    "assistant_model",
    "peft_model",
]


def read(line: str) -> OfflineTask:
    return read_task(line.split())


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_lines(preset: str) -> None:
    for found in PRESETS[preset].rows:
        row = found.row
        cards = found.published.cards if found.published else 1
        spawned = f"--use_deepspeed --world_size {cards} " if cards > 1 else ""
        task = read(
            f"{spawned}--model_name_or_path some/model {PUBLISHED[preset]} --max_new_tokens {row.outputs}"
            f" --max_input_tokens {row.inputs} --batch_size {row.requests} --warmup 2 --n_iterations 3"
        )
        assert task.rows == [row] and task.settings.get("num_shard", 1) == cards
        assert (task.iterations, task.warmups, task.whole_warmups) == (3, 2, True)
        settings = {name: task.settings[name] for name in ("model_id", "dtype", "enable_hpu_graph", "limit_hpu_graph")}
        assert settings == {
            "model_id": "some/model",
            "dtype": "bfloat16",
            "enable_hpu_graph": True,
            "limit_hpu_graph": True,
        }
        assert task.settings["pad_sequence_to_multiple_of"] == 128


def test_defaults_of_the_reference() -> None:
    task = read("--use_kv_cache")
    assert (task.rows, task.iterations, task.warmups) == ([Row(16, 100, 1)], 5, 3)
    assert read("--batch_size 2 --max_input_tokens 0").rows == [Row(16, 100, 2)]
    plain = read("64/8/2")
    assert (plain.iterations, plain.warmups, plain.whole_warmups, plain.asked) == (1, 1, False, None)


def test_every_flag_of_the_reference_is_known_and_explained() -> None:
    assert set(REFERENCE) == set(NAMES)
    text = subprocess.run(
        [sys.executable, "-m", "text_generation_inference.cli", "bench", "offline", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in (*REFERENCE, "warmup", "seed"):
        assert re.search(rf"\n  --{name}\b[^\n]*(\n {{10,}}\S|  \S)", text), name


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("ignore_eos",)])
def test_each_says_what_it_does_or_is_refused(name: str) -> None:
    values = {"temperature": "0.5", "top_p": "0.5", "penalty_alpha": "0.5", "output_dir": "out"}
    try:
        task = read(f"--{name}")
    except StartError as error:
        if "expected one argument" not in str(error):
            assert f"--{name} is not supported: " in str(error)
            return
        try:
            task = read(f"--{name} {values.get(name, '7')}")
        except StartError as refused:
            assert f"--{name} is not supported: " in str(refused)
            return
    assert task.asked is not None
    assert [note.split(": ", 1)[0].split()[0] for note in task.asked.notes] == [f"--{name}"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--batch_size 0", "--batch_size must be >= 1. Given: 0"),
        ("--max_new_tokens -1", "--max_new_tokens must be >= 1. Given: -1"),
        ("--batch_size 2 64/8/2", "flags of run_generation are a row of their own: leave 64/8/2 out"),
        ("--batch_size 2 --preset gaudi2-small", "--preset gaudi2-small has rows of its own"),
        ("--model_name_or_path a --model-id b", "--model_name_or_path names a model: leave --model-id and --shape out"),
        ("--do_sample", "--do_sample is not supported: rows are greedy"),
        ("--batch_size many", "--batch_size: invalid int value: 'many'"),
        ("--use_kv_cash", "unrecognized arguments: --use_kv_cash"),
    ],
)
def test_mistakes(line: str, error: str) -> None:
    with pytest.raises(StartError, match=re.escape(error)):
        read(line)


def test_neutral_values_are_no_mistakes() -> None:
    assert read("--num_beams 1 --num_return_sequences 1 --temperature 1.0 --dataset_max_samples -1").asked is not None


def test_throughput_by_the_published_formula() -> None:
    found: dict[str, Any] = dict.fromkeys(RowResult.__struct_fields__)
    result = RowResult(**{**found, "inputs": 128, "outputs": 128, "requests": 1230, "iterations": 5, "seconds": 60.0})
    assert describe_throughput(result) == (
        "Throughput = 5 iterations x 1230 requests x 128 new tokens / 60.000 s = 13120.00 tokens/second"
    )


def test_figures_of_one_gpu_and_no_figures() -> None:
    for line, text in {
        "--num-shard 2 --floor 16/4/1": "--floor is about one GPU: leave --num-shard out",
        "--num-shard 2 --profile 2/16": "--profile is about one GPU: leave --num-shard out",
        "--dry-run --json x.json": "--dry-run takes no figures: leave --json out",
        "--world_size 0": "`num_shard` cannot be < 1",
    }.items():
        with pytest.raises(StartError, match=re.escape(text)):
            read(line)
