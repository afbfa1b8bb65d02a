"""The command `tgi bench offline`: how fast does a model run here, without a server?

Level 9. Reads the flags and says what is wrong with them before anything heavy is imported; `offline` does the work.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from tgi.bench.results import Row, parse_row
from tgi.bench.shapes import SHAPES
from tgi.config import CHOICES, ENGINE_SETTINGS, ServerConfig, parse_value, read_environment
from tgi.errors import StartError, TgiError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
_DEFAULT_ROWS = ["64/128/1", "64/128/4", "64/128/16"]

# Flags that set the field of `ServerConfig` with their name: (flag, what its value is called, help).
_SETTINGS = (
    ("--model-id", "MODEL", "embedded (the default), a model folder, a .gguf file, or a model on the hub"),
    ("--revision", "NAME", "commit, branch or tag on the hub"),
    ("--load-format", "FORMAT", f"{' or '.join(CHOICES['load_format'])}: random weights from config.json alone"),
    ("--device", "NAME", "auto, cpu or cuda"),
    ("--dtype", "TYPE", "of the weights: " + ", ".join(CHOICES["dtype"])),
    ("--quantize", "METHOD", "such as fp8"),
    ("--kv-cache-dtype", "TYPE", "of the KV cache: " + ", ".join(CHOICES["kv_cache_dtype"])),
    ("--max-batch-prefill-tokens", "N", "prompt tokens computed in a step"),
    ("--max-batch-total-tokens", "N", "tokens in the KV cache"),
    ("--max-batch-size", "N", "requests computed at a time (default: the most of any row, at most 2048)"),
    ("--max-total-tokens", "N", "longest prompt and answer together (default: the longest row)"),
    ("--cuda-memory-fraction", "X", "share of the GPU's memory to use"),
    ("--cuda-graphs", "LIST", "batch sizes to capture, separated by commas; 0: none"),
    ("--num-threads", "N", "CPU threads"),
    ("--cache-dir", "DIR", "converted models and compiled kernels"),
)


class Shown(NamedTuple):
    """A decode step to take apart."""

    rows: int
    context: int


class Task(msgspec.Struct, kw_only=True):
    """What was asked for, checked as far as can be without the model."""

    rows: list[Row]
    shape: str | None
    settings: dict[str, Any]  # fields of `ServerConfig`
    warmups: int
    seed: int
    floor: bool
    profile: Shown | None
    json_path: str | None
    quiet: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def main(arguments: Sequence[str], prog: str = "tgi bench") -> int:
    match list(arguments):
        case ["offline", *rest]:
            return _run_guarded(rest, f"{prog} offline")
        case [("-h" | "--help"), *_]:
            print(
                f"usage: {prog} offline [OPTIONS] [IN/OUT/REQUESTS ...]\n\nMeasure; `{prog} offline --help` says how."
            )
            return 0
        case _:
            print(f"error: say what to measure: {prog} offline (see {prog} offline --help)", file=sys.stderr)
            return EXIT_USAGE


def _run_guarded(arguments: list[str], prog: str) -> int:
    try:
        task = read_task(arguments, prog)
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        from tgi.bench.offline import run_offline  # loads torch, which takes seconds: mistakes above are told at once

        return run_offline(task)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say to it
        return EXIT_ERROR
    except (TgiError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted before anything was measured", file=sys.stderr)
        return EXIT_INTERRUPTED


def read_task(arguments: list[str], prog: str = "tgi bench offline") -> Task:
    """Raises `StartError` naming the first flag or row that makes no sense."""
    options = _build_parser(prog).parse_intermixed_args(arguments)
    settings = read_environment(only=ENGINE_SETTINGS)
    for flag, _, _ in _SETTINGS:
        field = flag[2:].replace("-", "_")
        text = getattr(options, field)
        if text is not None:
            settings[field] = parse_value(field, text, f"{flag} {text!r}")
    settings["prefix_caching"] = options.prefix_caching
    if options.shape is not None:
        if options.model_id is not None:
            raise StartError("--shape and --model-id both name a model: leave one out")
        if settings.get("load_format", "dummy") != "dummy":
            raise StartError("--shape has no weights of its own: leave --load-format out, or say dummy")
        settings["load_format"] = "dummy"
    if options.warmup < 0:
        raise StartError(f"--warmup must be >= 0. Given: {options.warmup}")
    profile = None
    if options.profile is not None:
        found = re.fullmatch(r"([1-9][0-9]{0,6})/([1-9][0-9]{0,8})", options.profile)
        if found is None:
            raise StartError(f"--profile {options.profile!r} is not ROWS/CONTEXT: two numbers above 0, such as 256/600")
        profile = Shown(int(found[1]), int(found[2]))
    ServerConfig(**settings).check()
    return Task(
        rows=[parse_row(text) for text in options.rows or ([] if profile else _DEFAULT_ROWS)],
        shape=options.shape,
        settings=settings,
        warmups=options.warmup,
        seed=options.seed,
        floor=options.floor,
        profile=profile,
        json_path=options.json,
        quiet=options.quiet,
    )


def _build_parser(prog: str) -> argparse.ArgumentParser:
    width = min(110, shutil.get_terminal_size((112, 24)).columns - 2)
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [OPTIONS] [IN/OUT/REQUESTS ...]",
        description="Run an engine without a server: REQUESTS prompts of IN random tokens, OUT new tokens each, greedy,"
        " nothing ends early, all there at the start. What each column means: docs/benchmarking.md.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=width),
        allow_abbrev=False,
    )
    parser.add_argument("rows", nargs="*", metavar="IN/OUT/REQUESTS", help=f"default: {' '.join(_DEFAULT_ROWS)}")
    model = parser.add_argument_group("model and engine (also from the environment, as for the server)")
    model.add_argument("--shape", choices=list(SHAPES), help="the dimensions of a known model, random weights")
    for flag, value, text in _SETTINGS:
        model.add_argument(flag, metavar=value, help=text)
    model.add_argument("--prefix-caching", action="store_true", help="reuse equal beginnings (default: off)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--warmup", type=int, default=1, metavar="N", help="short runs before each row (default: 1)")
    measuring.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: 0)")
    measuring.add_argument("--floor", action="store_true", help="the least time the GPU could take, beside each row")
    measuring.add_argument("--profile", metavar="ROWS/CONTEXT", help="take a decode step on a GPU apart")
    measuring.add_argument("--json", metavar="FILE", help="also write everything there, after each row")
    measuring.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser
