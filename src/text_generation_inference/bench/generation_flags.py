"""The flags of the program behind the published offline figures (`run_generation`) and of the one that starts it on
several cards (`gaudi_spawn`), and what each does here.

With any of them `tgi bench offline` measures one row by that program's
method: whole warm-up runs, then iterations, and throughput as iterations x batch x new tokens / seconds of all
iterations. Its command lines are taken as they are; what cannot be done is refused, what changes nothing says so.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import msgspec

from text_generation_inference.bench.command_line import check_range
from text_generation_inference.bench.results import Row, RowResult
from text_generation_inference.errors import StartError

_WARM_UPS, _ITERATIONS, _NEW_TOKENS, _INPUT_TOKENS = 3, 5, 100, 16
_PREFIX = "generation_"  # of the parser's own names, apart from those of our flags


class GenerationRun(msgspec.Struct, kw_only=True):
    """What a command line with such flags asks for."""

    row: Row
    iterations: int
    warmups: int
    settings: dict[str, Any]  # fields of `ServerConfig`
    json_path: str | None
    notes: list[str]  # what each flag did, in words


class _Flag(msgspec.Struct, frozen=True):
    """`does` says what it does here; `refuses` why it is refused (unless the value is `neutral`)."""

    name: str
    does: str = ""
    value: str = ""  # what is shown for its value; empty: a switch
    kind: Callable[[str], Any] = str
    settings: Callable[[Any], dict[str, Any]] | None = None
    refuses: str = ""
    neutral: Any = None


_GREEDY = "rows are greedy, so that figures can be compared"
_RANDOM = "prompts are random tokens of --max_input_tokens each"
_ALWAYS = "no effect: it is always so"

_FLAGS = (
    _Flag("model_name_or_path", "as --model-id", "MODEL", settings=lambda value: {"model_id": value}),
    _Flag("bf16", "as --dtype bfloat16; without it the device's own type", settings=lambda _: {"dtype": "bfloat16"}),
    _Flag("batch_size", "requests of the row, all there at the start (default: 1)", "N", int),
    _Flag("max_input_tokens", f"random tokens of each prompt (default, and for 0: {_INPUT_TOKENS})", "N", int),
    _Flag("max_new_tokens", f"new tokens of each request (default: {_NEW_TOKENS})", "N", int),
    _Flag("n_iterations", f"as --iterations (default with these flags: {_ITERATIONS})", "N", int),
    _Flag("use_kv_cache", f"{_ALWAYS}, keys and values are kept"),
    _Flag("reuse_cache", f"{_ALWAYS}, the cache stays on the device"),
    _Flag(
        "bucket_size",
        "lengths of prompts are padded to multiples of it where batches are padded (see --bucketing of the server)",
        "N",
        int,
        lambda value: {"pad_sequence_to_multiple_of": value} if value > 0 else {},
    ),
    _Flag("bucket_internal", f"{_ALWAYS}, attention reads the blocks that are filled"),
    _Flag("trim_logits", f"{_ALWAYS}, logits are computed for the last token of a prompt"),
    _Flag("attn_softmax_bf16", "no effect: the kernels of attention choose their own precision"),
    _Flag("use_hpu_graphs", "ENABLE_HPU_GRAPH=true, on Gaudi", settings=lambda _: {"enable_hpu_graph": True}),
    _Flag("limit_hpu_graphs", "LIMIT_HPU_GRAPH=true, on Gaudi", settings=lambda _: {"limit_hpu_graph": True}),
    _Flag(
        "use_flash_attention", "USE_FLASH_ATTENTION=true, on Gaudi", settings=lambda _: {"use_flash_attention": True}
    ),
    _Flag(
        "flash_attention_recompute",
        "FLASH_ATTENTION_RECOMPUTE=true, on Gaudi",
        settings=lambda _: {"flash_attention_recompute": True},
    ),
    _Flag("flash_attention_causal_mask", f"{_ALWAYS}, prompts are computed with the causal flag"),
    _Flag("flash_attention_fast_softmax", "no effect: the kernels of attention choose their own precision"),
    _Flag("torch_compile", "PT_HPU_LAZY_MODE=0, on Gaudi", settings=lambda _: {"pt_hpu_lazy_mode": False}),
    _Flag("regional_compile", "no effect: what is compiled follows from the device"),
    _Flag("force_static_compile", f"{_ALWAYS}, shapes are those of the plan"),
    _Flag("cache_size_limit", "no effect: every shape of the plan is kept", "N", int),
    _Flag("reduce_recompile", f"{_ALWAYS}, shapes are those of the plan"),
    _Flag("fp8", "no effect: QUANT_CONFIG or --quantize fp8 asks for FP8"),
    _Flag("disk_offload", "no effect: weights are read from disk in slices anyway"),
    _Flag("const_serialization_path", "no effect: weights stay on the device", "DIR"),
    _Flag("attn_batch_split", "no effect: a step is computed whole", "N", int),
    _Flag("world_size", "as --num-shard: the cards of gaudi_spawn", "N", int, lambda value: {"num_shard": value}),
    _Flag("use_deepspeed", "no effect: ranks split the model themselves"),
    _Flag("use_mpi", "no effect: ranks split the model themselves"),
    _Flag("parallel_strategy", "no effect: ranks split every matrix", "NAME"),
    _Flag("output_dir", "as --json DIR/results.json", "DIR"),
    _Flag("verbose_workers", "no effect: ranks log what goes wrong"),
    _Flag("show_graphs_count", "no effect: the notes of the report tell"),
    _Flag("profiling_warmup_steps", "no effect: use --profile ROWS/CONTEXT", "N", int),
    _Flag("profiling_steps", "no effect: use --profile ROWS/CONTEXT", "N", int),
    _Flag("profiling_record_shapes", "no effect: use --profile ROWS/CONTEXT"),
    _Flag("profile_whole_sequences", "no effect: use --profile ROWS/CONTEXT"),
    _Flag("ignore_eos", f"{_ALWAYS}, nothing ends early"),
    _Flag("no-ignore_eos", refuses="every request has the same number of new tokens, so nothing ends early"),
    _Flag("do_sample", refuses=_GREEDY),
    _Flag("num_beams", value="N", kind=int, refuses=_GREEDY, neutral=1),
    _Flag("num_return_sequences", value="N", kind=int, refuses=_GREEDY, neutral=1),
    _Flag("top_k", value="N", kind=int, refuses=_GREEDY),
    _Flag("top_p", value="X", kind=float, refuses=_GREEDY),
    _Flag("temperature", value="X", kind=float, refuses=_GREEDY, neutral=1.0),
    _Flag("penalty_alpha", value="X", kind=float, refuses=_GREEDY),
    _Flag("bad_words", value="WORDS", refuses=_GREEDY),
    _Flag("force_words", value="WORDS", refuses=_GREEDY),
    _Flag("prompt", value="TEXT", refuses=_RANDOM),
    _Flag("dataset_name", value="NAME", refuses=_RANDOM),
    _Flag("column_name", value="NAME", refuses=_RANDOM),
    _Flag("dataset_max_samples", value="N", kind=int, refuses=_RANDOM, neutral=-1),
    _Flag("book_source", refuses=_RANDOM),
    _Flag("mlcommons_dataset", value="FILE", refuses=_RANDOM),
    _Flag("simulate_dyn_prompt", value="LENGTHS", refuses="give a row for each length: IN/OUT/REQUESTS"),
    _Flag("assistant_model", value="MODEL", refuses="tokens are generated one at a time"),
    _Flag("peft_model", value="MODEL", refuses="merge the adapter into the model first"),
)
NAMES = tuple(flag.name for flag in _FLAGS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "flags of run_generation (with any of them, one row by its method; --warmup then counts whole runs)"
    )
    for flag in _FLAGS:
        names, dest = f"--{flag.name}", _PREFIX + flag.name
        help_text = (f"refused: {flag.refuses}" if flag.refuses else flag.does).replace("%", "%%")
        if flag.value:
            group.add_argument(names, dest=dest, metavar=flag.value, type=flag.kind, help=help_text)
        else:
            group.add_argument(names, dest=dest, action="store_const", const=True, help=help_text)


def read_flags(options: argparse.Namespace) -> GenerationRun | None:
    """What they ask for; None if none was given. Raises `StartError` for what cannot be done."""
    values = {flag.name: getattr(options, _PREFIX + flag.name) for flag in _FLAGS}
    given = [flag for flag in _FLAGS if values[flag.name] is not None]
    if not given:
        return None
    settings: dict[str, Any] = {}
    notes: list[str] = []
    for flag in given:
        value = values[flag.name]
        if flag.refuses:
            if value == flag.neutral:
                continue
            raise StartError(f"--{flag.name} is not supported: {flag.refuses}")
        shown = f"--{flag.name}" + (f" {value}" if flag.value else "")
        notes.append(f"{shown}: {flag.does}")
        if flag.settings is not None:
            settings |= flag.settings(value)
    folder = values["output_dir"]
    return GenerationRun(
        row=Row(
            _number("max_input_tokens", values["max_input_tokens"], 0, 0) or _INPUT_TOKENS,
            _number("max_new_tokens", values["max_new_tokens"], _NEW_TOKENS, 1),
            _number("batch_size", values["batch_size"], 1, 1),
        ),
        iterations=_number("n_iterations", values["n_iterations"], _ITERATIONS, 1),
        warmups=_WARM_UPS,
        settings=settings,
        json_path=None if folder is None else os.path.join(folder, "results.json"),
        notes=notes,
    )


def _number(name: str, value: int | None, default: int, least: int) -> int:
    if value is None:
        return default
    check_range(f"--{name}", value, least)
    return value


def describe_throughput(result: RowResult) -> str:
    """Throughput by the published formula, with its terms. Prompts are token ids here: no text is tokenised."""
    tokens = result.iterations * result.requests * result.outputs
    return (
        f"Throughput = {result.iterations} iterations x {result.requests} requests x {result.outputs} new tokens"
        f" / {result.seconds:.3f} s = {tokens / result.seconds:.2f} tokens/second"
    )
