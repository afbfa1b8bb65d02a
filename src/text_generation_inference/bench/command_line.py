"""What the commands of `tgi bench` have in common: mistakes are one line on standard error, never a traceback.

Knows the settings of an engine, and loads nothing heavy.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from text_generation_inference.config import CHOICES, SETTINGS, parse_value
from text_generation_inference.errors import StartError, TgiError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# Flags that set the field of `ServerConfig` with their name: what its value is called, and help.
ENGINE_FLAGS = {
    "--model-id": ("MODEL", "embedded (the default), a model folder, a .gguf file, or a model on the hub"),
    "--revision": ("NAME", "commit, branch or tag on the hub (default: main)"),
    "--load-format": ("FORMAT", f"{' or '.join(CHOICES['load_format'])}: random weights from config.json alone"),
    "--device": ("NAME", SETTINGS["device"].help),
    "--num-shard": ("N", "ranks that the model is split over, each with a card of its own (default: 1)"),
    "--dtype": ("TYPE", "of the weights: " + ", ".join(CHOICES["dtype"])),
    "--quantize": ("METHOD", "such as fp8; with random weights gptq is 4 bits in groups of 128"),
    "--kv-cache-dtype": ("TYPE", "of the KV cache: " + ", ".join(CHOICES["kv_cache_dtype"])),
    "--max-batch-prefill-tokens": ("N", "prompt tokens computed in a step"),
    "--max-batch-total-tokens": ("N", "tokens in the KV cache"),
    "--max-batch-size": ("N", "requests computed at a time (default: the most of any row, at most 2048)"),
    "--max-total-tokens": ("N", "longest prompt and answer together (default: the longest row)"),
    "--bucketing": ("true|false", "pad every step to a shape that was warmed up"),
    "--bucket-strategy": ("NAME", "its shapes: linear or exponential"),
    "--cuda-memory-fraction": ("X", "share of the GPU's memory to use"),
    "--cuda-graphs": ("LIST", "batch sizes to capture, separated by commas; 0: none"),
    "--num-threads": ("N", "CPU threads"),
    "--cache-dir": ("DIR", "converted models and compiled kernels"),
}

Task = TypeVar("Task")


class Parser(argparse.ArgumentParser):
    """Raises `StartError` for a flag that makes no sense; never abbreviates."""

    def __init__(self, prog: str, usage: str, description: str, add_help: bool = True) -> None:
        width = min(110, shutil.get_terminal_size((112, 24)).columns - 2)
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=width),
            allow_abbrev=False,
            add_help=add_help,
        )

    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def engine_settings(options: argparse.Namespace, flags: Iterable[str]) -> dict[str, Any]:
    """The fields of `ServerConfig` that were given by flags."""
    settings: dict[str, Any] = {}
    for flag in flags:
        field = flag[2:].replace("-", "_")
        text = getattr(options, field)
        if text is not None:
            settings[field] = parse_value(field, text, f"{flag} {text!r}")
    return settings


def check_range(flag: str, value: int, lowest: int, highest: int | None = None) -> None:
    """Raises `StartError` outside of it."""
    if value < lowest or (highest is not None and value > highest):
        bounds = f">= {lowest}" if highest is None else f">= {lowest} and <= {highest}"
        raise StartError(f"{flag} must be {bounds}. Given: {value}")


def run(read: Callable[[], Task], work: Callable[[Task], int], interrupted: str) -> int:
    """The exit status of `work` on what `read` makes of the command line."""
    try:
        task = read()
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return work(task)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say to it
        return EXIT_ERROR
    except (TgiError, OSError) as error:
        with suppress(OSError):  # the terminal may be gone
            print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
