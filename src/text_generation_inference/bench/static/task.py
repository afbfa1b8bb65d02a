"""What `text-generation-benchmark` is asked to do: its flags, their environment variables, and the checks of both.

Never torch. A flag beats its variable. The limits of a server (such as MAX_TOTAL_TOKENS) are not read from the
environment: the engine's limits follow from the batches.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from text_generation_inference.bench.command_line import ENGINE_FLAGS, Parser, engine_settings
from text_generation_inference.config import (
    ENGINE_SETTINGS,
    ServerConfig,
    read_environment,
    variable_of,
)
from text_generation_inference.errors import StartError
from text_generation_inference.types import SamplingParams
from text_generation_inference.version import __version__

DEFAULT_BATCH_SIZES = [1, 2, 4, 8, 16, 32]
_LARGEST_BATCH = 16_384
_LONGEST = 10_000_000  # tokens of a prompt or an answer, runs: beyond it is a slip of the finger
_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """As given; None where nothing was said."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    watermark: bool = False
    do_sample: bool = False
    top_n_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not None and value is not False}

    def params(self) -> SamplingParams:
        return SamplingParams(**self.given(), seed=0, ignore_eos=True)


class StaticTask(msgspec.Struct, kw_only=True):
    """Checked as far as can be without the model."""

    model: str
    settings: dict[str, Any]  # fields of `ServerConfig`
    batch_sizes: list[int]
    sequence_length: int
    decode_length: int
    runs: int
    warmups: int
    sampling: Sampling
    json_path: str | None = None
    plain: bool = False
    quiet: bool = False
    notes: list[str] = []  # to be told first


class _StaticFlag(NamedTuple):
    names: str  # separated by spaces, the long one last
    kind: str  # "text", "count", "size", "number" or "switch"
    default: Any
    help: str
    value: str = ""

    @property
    def long(self) -> str:
        return self.names.split()[-1]

    @property
    def field(self) -> str:
        return self.long[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        return self.field.upper()


_MEASURING = [
    _StaticFlag("-s --sequence-length", "size", 10, "tokens of each prompt", "N"),
    _StaticFlag("-d --decode-length", "size", 8, "tokens of each answer; the first one comes from the prefill", "N"),
    _StaticFlag("-r --runs", "size", 10, "measured rounds of each batch size", "N"),
    _StaticFlag("-w --warmups", "count", 1, "rounds of each batch size before them, which are not measured", "N"),
]
_SAMPLING = [
    _StaticFlag("--temperature", "number", None, "of the scores; not 1: sample", "X"),
    _StaticFlag("--top-k", "count", None, "keep the k best tokens", "N"),
    _StaticFlag("--top-p", "number", None, "keep the likeliest tokens that hold this mass", "X"),
    _StaticFlag("--typical-p", "number", None, "keep the most typical tokens that hold this mass", "X"),
    _StaticFlag("--repetition-penalty", "number", None, "above 1: fewer repetitions", "X"),
    _StaticFlag("--frequency-penalty", "number", None, "-2 to 2", "X"),
    _StaticFlag("--watermark", "switch", False, "mark the text as generated"),
    _StaticFlag("--do-sample", "switch", False, "sample although no option above asks for it"),
    _StaticFlag("--top-n-tokens", "count", None, "also find the N best tokens at each step", "N"),
]
_UDS = _StaticFlag("-m --master-shard-uds-path", "text", None, "no effect: the engine runs in this process", "PATH")

# Flags that set fields of `ServerConfig`; what the batches decide has none.
_DECIDED = ("--model-id", "--num-shard", "--max-batch-size", "--max-total-tokens", "--bucketing", "--bucket-strategy")
_ENGINE = {flag: words for flag, words in ENGINE_FLAGS.items() if flag not in _DECIDED} | {
    "--max-batch-prefill-tokens": ("N", "prompt tokens computed in a step (default: a whole batch, if memory allows)"),
    "--max-batch-total-tokens": ("N", "tokens in the KV cache (default: what the largest batch needs)"),
}
_LIMITS = frozenset(field for field in ENGINE_SETTINGS if field.startswith("max_") or field == "prefix_caching")


def read_task(arguments: Sequence[str], environment: Mapping[str, str], prog: str) -> StaticTask:
    """Raises `TgiError` naming the first flag or variable that makes no sense."""
    options = build_parser(prog).parse_args(list(arguments))
    found = {flag.field: _value_of(flag, options, environment) for flag in (*_MEASURING, *_SAMPLING, _UDS)}
    model = options.tokenizer_name or environment.get("TOKENIZER_NAME")
    if not model:
        raise StartError(
            "--tokenizer-name is missing: name the model to measure, such as embedded, a folder, a .gguf file or an id"
            " on the hub"
        )
    sampling = Sampling(**{flag.field: found[flag.field] for flag in _SAMPLING})
    sampling.params().check()
    return StaticTask(
        model=model,
        settings=_engine_settings(options, environment),
        batch_sizes=_batch_sizes(options.batch_size or []),
        sampling=sampling,
        json_path=options.json,
        plain=options.plain,
        quiet=options.quiet,
        notes=_notes(found["master_shard_uds_path"]),
        **{flag.field: found[flag.field] for flag in _MEASURING},
    )


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog,
        usage="%(prog)s --tokenizer-name MODEL [OPTIONS]",
        description="Measure static batches: for each batch size so many rounds of one prefill and the decode steps"
        " after it, without HTTP. The model runs in this process. On a terminal the figures are shown while they come;"
        " at the end three Markdown tables are printed. What each figure means: docs/benchmarking.md.",
        add_help=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="show this help")
    general.add_argument("-V", "--version", action="version", version=f"{prog} {__version__}", help="show the version")
    model = parser.add_argument_group("model")
    model.add_argument(
        "-t",
        "--tokenizer-name",
        metavar="MODEL",
        help="the model to measure, with its tokenizer: embedded, a model folder, a .gguf file, or a model on the hub"
        " (required) [env: TOKENIZER_NAME]",
    )
    measuring = parser.add_argument_group("measuring")
    sizes = " ".join(map(str, DEFAULT_BATCH_SIZES))
    measuring.add_argument(
        "-b", "--batch-size", metavar="N", action="append", help=f"repeatable, or with commas (default: {sizes})"
    )
    _add(measuring, _MEASURING)
    _add(parser.add_argument_group("sampling (seed 0; the end of a text is ignored)"), _SAMPLING)
    engine = parser.add_argument_group("engine")
    for flag, (value, text) in _ENGINE.items():
        field = flag[2:].replace("-", "_")
        variable = variable_of(field) if field in ENGINE_SETTINGS - _LIMITS else None
        engine.add_argument(flag, metavar=value, help=f"{text} [env: {variable}]" if variable else text)
    _add(engine, [_UDS])
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="also write everything there, after each batch size")
    output.add_argument("--plain", action="store_true", help="progress as lines, also on a terminal")
    output.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser


def _add(group: "argparse._ArgumentGroup", flags: list[_StaticFlag]) -> None:
    for flag in flags:
        default = f" (default: {flag.default})" if flag.default not in (None, False) else ""
        text = f"{flag.help}{default} [env: {flag.variable}]"
        if flag.kind == "switch":
            group.add_argument(*flag.names.split(), action="store_true", help=text)
        else:
            group.add_argument(*flag.names.split(), metavar=flag.value, help=text)


def _value_of(flag: _StaticFlag, options: argparse.Namespace, environment: Mapping[str, str]) -> Any:
    """From the flag, else from its variable, else the default. An empty variable counts as not set."""
    given = getattr(options, flag.field)
    if given is not None and given is not False:
        return True if flag.kind == "switch" else _parse(flag.kind, given, f"{flag.long} {given!r}")
    text = environment.get(flag.variable)
    return _parse(flag.kind, text, f"environment variable {flag.variable}={text!r}") if text else flag.default


def _parse(kind: str, text: str, origin: str) -> Any:
    if kind == "text":
        return text
    if kind == "switch":
        if text.strip().lower() not in _SWITCH:
            raise StartError(f"{origin} is not valid: it must be true or false")
        return _SWITCH[text.strip().lower()]
    if kind == "number":
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text.strip(), re.ASCII | re.IGNORECASE):
            raise StartError(f"{origin} is not valid: it must be a number")
        return float(text)
    least = 1 if kind == "size" else 0
    if not re.fullmatch(r"[0-9]{1,8}", text) or not least <= int(text) <= _LONGEST:
        raise StartError(f"{origin} is not valid: it must be a whole number from {least} to {_LONGEST}")
    return int(text)


def _batch_sizes(given: list[str]) -> list[int]:
    """In the order given, each once."""
    sizes: list[int] = []
    for text in (part for item in given for part in item.split(",")):
        if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= _LARGEST_BATCH:
            raise StartError(
                f"--batch-size {text!r} is not valid: it must be a whole number from 1 to {_LARGEST_BATCH}"
            )
        sizes.append(int(text))
    return list(dict.fromkeys(sizes)) or list(DEFAULT_BATCH_SIZES)


def _engine_settings(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    settings = read_environment(environment, only=ENGINE_SETTINGS - _LIMITS)
    settings |= engine_settings(options, _ENGINE)
    settings["prefix_caching"] = False  # every copy of the prompt is computed
    ServerConfig(**settings).check()
    return settings


def _notes(uds_path: str | None) -> list[str]:
    if uds_path is None:
        return []
    return ["--master-shard-uds-path has no effect: the engine runs in this process, no server is asked"]
