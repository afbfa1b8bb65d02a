"""The command `tgi bench offline`: how fast does a model run here, without a server?

Reads the flags and says what is wrong with them before anything heavy is imported; `offline` does the work.
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from text_generation_inference.bench import command_line, generation_flags
from text_generation_inference.bench.generation_flags import GenerationRun
from text_generation_inference.bench.presets import PRESETS, Preset
from text_generation_inference.bench.results import Published, Row, parse_row
from text_generation_inference.bench.shapes import SHAPES
from text_generation_inference.collection import pause_collection
from text_generation_inference.config import ENGINE_SETTINGS, ServerConfig, prepare_process, read_environment
from text_generation_inference.devices.visible import begin_early
from text_generation_inference.errors import StartError

_DEFAULT_ROWS = ["64/128/1", "64/128/4", "64/128/16"]


class Shown(NamedTuple):
    """What is taken apart: a decode step, or the steps of prompts."""

    rows: int
    context: int
    prompts: bool = False

    def __str__(self) -> str:
        return f"{self.rows} {'prompts of' if self.prompts else 'rows at'} {self.context:,} tokens"


class OfflineTask(msgspec.Struct, kw_only=True):
    """What was asked for, checked as far as can be without the model."""

    rows: list[Row]
    shape: str | None
    settings: dict[str, Any]  # fields of `ServerConfig`
    preset: str | None
    published: dict[Row, Published]
    iterations: int
    warmups: int
    whole_warmups: bool = False  # of the whole row, not of a piece
    asked: GenerationRun | None = None  # by flags of run_generation
    seed: int
    floor: bool
    profiles: list[Shown]
    json_path: str | None
    dry_run: bool = False  # rows are computed, nothing is timed
    quiet: bool


def main(arguments: Sequence[str], prog: str = "tgi bench offline") -> int:
    return command_line.run(
        lambda: read_task(list(arguments), prog), _run, interrupted="interrupted before anything was measured"
    )


def _run(task: OfflineTask) -> int:
    pause_collection()
    prepare_process(ServerConfig(**task.settings))
    begin_early(task.settings.get("device", "auto"), task.settings.get("num_shard") or 1)
    from text_generation_inference.bench.offline import (
        run_offline,  # loads torch, which takes seconds: mistakes in flags are told at once
    )

    return run_offline(task)


def read_task(arguments: list[str], prog: str = "tgi bench offline") -> OfflineTask:
    """Raises `StartError` naming the first flag or row that makes no sense."""
    options = _build_parser(prog).parse_intermixed_args(arguments)
    preset = None if options.preset is None else PRESETS[options.preset]
    asked = generation_flags.read_flags(options)
    if preset is not None:
        _check_preset(options)
    if asked is not None:
        _check_asked(options, asked)
    shape = options.shape or (preset.shape if preset is not None and options.model_id is None else None)
    settings = read_environment(only=ENGINE_SETTINGS)
    if preset is not None:
        settings |= preset.settings
    if asked is not None:
        settings |= asked.settings
    settings |= command_line.engine_settings(options, command_line.ENGINE_FLAGS)
    settings["prefix_caching"] = options.prefix_caching
    if shape is not None:
        if options.model_id is not None:
            raise StartError("--shape and --model-id both name a model: leave one out")
        if settings.get("load_format", "dummy") != "dummy":
            raise StartError("--shape has no weights of its own: leave --load-format out, or say dummy")
        settings["load_format"] = "dummy"
    for flag, value, lowest in (("--warmup", options.warmup, 0), ("--iterations", options.iterations, 1)):
        if value is not None:
            command_line.check_range(flag, value, lowest)
    profiles = [_read_shown(text) for text in options.profile]
    for flag, given in (("--floor", options.floor), ("--profile", profiles)):
        if given and (settings.get("num_shard") or 1) > 1:
            raise StartError(f"{flag} is about one GPU: leave --num-shard out")
    for flag, given in (("--floor", options.floor), ("--profile", profiles), ("--json", options.json)):
        if given and options.dry_run:
            raise StartError(f"--dry-run takes no figures: leave {flag} out")
    ServerConfig(**settings).check()
    return OfflineTask(
        rows=_choose_rows(options, preset) if asked is None else [asked.row],
        shape=shape,
        settings=settings,
        preset=options.preset,
        published={found.row: found.published for found in preset.rows if found.published} if preset else {},
        iterations=options.iterations or (preset or asked or _Defaults()).iterations,
        warmups=(asked or _Defaults()).warmups if options.warmup is None else options.warmup,
        whole_warmups=asked is not None,
        asked=asked,
        seed=options.seed,
        floor=options.floor,
        profiles=profiles,
        json_path=options.json or (asked.json_path if asked is not None else None),
        dry_run=options.dry_run,
        quiet=options.quiet,
    )


def _read_shown(text: str) -> Shown:
    found = re.fullmatch(r"(prompts:)?([1-9][0-9]{0,6})/([1-9][0-9]{0,8})", text)
    if found is None:
        raise StartError(
            f"--profile {text!r} is neither ROWS/CONTEXT nor prompts:ROWS/TOKENS: two numbers above 0, such as 256/600"
        )
    return Shown(int(found[2]), int(found[3]), found[1] is not None)


def _check_preset(options: argparse.Namespace) -> None:
    if options.rows:
        raise StartError(f"--preset {options.preset} has rows of its own: leave {options.rows[0]} out")
    if options.shape is not None:
        raise StartError(f"--preset {options.preset} names a model itself: leave --shape out, or give --model-id")


def _check_asked(options: argparse.Namespace, asked: GenerationRun) -> None:
    """Flags of run_generation are a row: nothing else may say one, nor a model twice."""
    if options.rows:
        raise StartError(f"flags of run_generation are a row of their own: leave {options.rows[0]} out")
    if options.preset is not None:
        raise StartError(f"--preset {options.preset} has rows of its own: leave the flags of run_generation out")
    if "model_id" in asked.settings and (options.model_id is not None or options.shape is not None):
        raise StartError("--model_name_or_path names a model: leave --model-id and --shape out")


class _Defaults(NamedTuple):
    """Of a row that somebody wrote."""

    iterations: int = 1
    warmups: int = 1


def _choose_rows(options: argparse.Namespace, preset: Preset | None) -> list[Row]:
    if preset is not None:
        return [found.row for found in preset.rows]
    return [parse_row(text) for text in options.rows or ([] if options.profile else _DEFAULT_ROWS)]


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog,
        usage="%(prog)s [OPTIONS] [IN/OUT/REQUESTS ...]",
        description="Run an engine without a server: REQUESTS prompts of IN random tokens, OUT new tokens each, greedy,"
        " nothing ends early, all there at the start. What each column means: docs/benchmarking.md.",
    )
    parser.add_argument("rows", nargs="*", metavar="IN/OUT/REQUESTS", help=f"default: {' '.join(_DEFAULT_ROWS)}")
    presets = "; ".join(f"{name}: {preset.text}" for name, preset in PRESETS.items())
    parser.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help=f"rows and their model. {presets}")
    model = parser.add_argument_group("model and engine (also from the environment, as for the server)")
    model.add_argument("--shape", choices=list(SHAPES), help="the dimensions of a known model, random weights")
    for flag, (value, text) in command_line.ENGINE_FLAGS.items():
        model.add_argument(flag, metavar=value, help=text)
    model.add_argument("--prefix-caching", action="store_true", help="reuse equal beginnings (default: off)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--iterations", type=int, metavar="N", help="runs of each row (default: 1, or the preset's)")
    measuring.add_argument("--warmup", type=int, metavar="N", help="short runs before each row (default: 1)")
    measuring.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: 0)")
    measuring.add_argument(
        "--floor", action="store_true", help="what the GPU's libraries alone would need, beside each row"
    )
    measuring.add_argument(
        "--profile", metavar="ROWS/CONTEXT", action="append", default=[],
        help="take a decode step on a GPU apart; with prompts: in front of it that many prompts. Repeatable",
    )  # fmt: skip
    measuring.add_argument("--json", metavar="FILE", help="also write everything there, after each row")
    measuring.add_argument(
        "--dry-run", action="store_true", help="compute each row once and time nothing: whether it runs"
    )
    measuring.add_argument("-q", "--quiet", action="store_true", help="no progress")
    generation_flags.add_flags(parser)
    return parser
