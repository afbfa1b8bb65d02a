"""`text-generation-server quantize`: makes a checkpoint in GPTQ of a model, as TGI's command of this name does.

Runs in this process, layer by layer. Ctrl-C ends it; the same command goes on after the last finished layer. Loads
torch only when there is work.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from text_generation_inference.config import (
    SETTINGS,
    ServerConfig,
    cache_folder,
    expand_home,
    parse_value,
    prepare_process,
    read_environment,
)
from text_generation_inference.errors import StartError
from text_generation_inference.launch.command import EXIT_INTERRUPTED, EXIT_USAGE, run_guarded
from text_generation_inference.make_quantized.settings import MakingSettings
from text_generation_inference.progress import StageBars

if TYPE_CHECKING:
    from text_generation_inference.make_quantized.make import Made

CALIBRATION = Path(__file__).parents[1] / "make_quantized" / "calibration.txt"
_SETTINGS = (
    "revision", "huggingface_hub_cache", "offline", "cache_dir", "trust_remote_code", "device", "num_threads",
    "weights_cache_override",
)  # fmt: skip
_GIGABYTE = 10**9
_SHOWN = 3


def main(arguments: Sequence[str], prog: str = "text-generation-server quantize") -> int:
    options = _build_parser(prog).parse_args(arguments)
    try:
        given = read_environment(only=_SETTINGS)
        given["model_id"] = options.model_id
        for name in ("revision", "trust_remote_code", "device"):
            if getattr(options, name) is not None:
                given[name] = parse_value(name, str(getattr(options, name)).lower(), f"--{name.replace('_', '-')}")
        _check(options)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_guarded(lambda: _run(ServerConfig(**given), options))


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Make a checkpoint in GPTQ of a model: matrices in few bits, rounded so that what they make of a"
        " text changes least. Run again after an interruption, it goes on after the last finished layer.",
        allow_abbrev=False,
    )
    flag = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("model_id", metavar="MODEL_ID", help="embedded, a folder, a .gguf file or a hub id")
    add("output_dir", metavar="OUTPUT_DIR", help="a folder for the checkpoint")
    add("--revision", help="commit, branch, tag or refs/pr/N [env: REVISION]")
    add("--logger-level", default="INFO", help="WARNING or ERROR: no line for each layer")
    add("--json-output", action=flag, default=False, help="progress as JSON lines")
    add("--trust-remote-code", action=flag, default=None, help="run code that comes with it [env: TRUST_REMOTE_CODE]")
    add("--upload-to-model-id", metavar="ID", help="not supported: upload the folder with `hf upload`")
    add(
        "--percdamp", type=float, default=0.01, metavar="SHARE", help="added to Hessians, of their mean (default: 0.01)"
    )
    add(
        "--act-order",
        action=flag,
        default=False,
        help="groups of inputs that matter alike, not of neighbours (`desc_act`)",
    )
    add("--static-groups", action=flag, default=True, help="round the inputs that matter most first (default)")
    add("--groupsize", type=int, default=128, metavar="N", help="inputs with a scale in common; -1: all (default: 128)")
    add("--bits", type=int, default=4, help="of a weight: 2, 3, 4 or 8 (default: 4)")
    add("--sym", action=flag, default=True, help="codes around 0, without zero points (default)")
    add(
        "--mse",
        action=flag,
        default=True,
        help="scales with the least error, not those that hold all (default)",
    )
    add(
        "--calibration",
        metavar="FILE",
        help="UTF-8 text of the kind that will be served (default: one of ours)",
    )
    add("--num-samples", type=int, default=128, metavar="N", help="windows of the text, at most (default: 128)")
    add("--sequence-length", type=int, default=2048, metavar="N", help="tokens of a window (default: 2048)")
    add("--batch-size", type=int, default=4, metavar="N", help="windows that are computed at once (default: 4)")
    add("--device", help=f"{SETTINGS['device'].help} [env: TGI_DEVICE]")
    add("--dtype", help="float32, float16 or bfloat16: of what is not in few bits (default: as it was)")
    add("--max-shard-gb", type=float, default=5.0, metavar="GB", help="of a file of weights, at most (default: 5)")
    return parser


def _read_settings(options: argparse.Namespace) -> MakingSettings:
    return MakingSettings(
        bits=options.bits,
        group_size=options.groupsize,
        act_order=options.act_order,
        static_groups=options.static_groups,
        symmetric=options.sym,
        percdamp=options.percdamp,
        clip=options.mse,
        num_samples=options.num_samples,
        sequence_length=options.sequence_length,
    )


def _check(options: argparse.Namespace) -> None:
    _read_settings(options).check()
    if options.upload_to_model_id is not None:
        raise StartError(
            "--upload-to-model-id is not supported: this command sends nothing anywhere. Leave it out, and upload"
            " the folder with `hf upload`."
        )
    if options.dtype not in (None, "float32", "float16", "bfloat16"):
        raise StartError(f"--dtype must be float32, float16 or bfloat16. Given: {options.dtype}")
    if options.batch_size < 1:
        raise StartError(f"--batch-size must be >= 1. Given: {options.batch_size}")
    if not 0 < options.max_shard_gb < math.inf:
        raise StartError(f"--max-shard-gb must be a number above 0. Given: {options.max_shard_gb}")


class _Lines:
    """A line for each layer, as text or JSON, on standard error; bars where that is a terminal."""

    def __init__(self, options: argparse.Namespace, bars: StageBars) -> None:
        self._as_json = options.json_output
        self._enabled = options.logger_level.upper() in ("TRACE", "DEBUG", "INFO")
        self._bars = bars

    def tell(self, text: str) -> None:
        """Of how far it is."""
        if self._enabled and (self._as_json or not sys.stderr.isatty()):
            self._print("INFO", text)

    def warn(self, text: str) -> None:
        self._print("WARN", text)

    def _print(self, level: str, text: str) -> None:
        line = msgspec.json.encode({"level": level, "message": text}).decode() if self._as_json else text
        print(line, file=sys.stderr, flush=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        if self._enabled and not self._as_json:
            self._bars.update(stage, done, total)


def _run(config: ServerConfig, options: argparse.Namespace) -> int:
    prepare_process(config)
    import torch

    from text_generation_inference.devices.device import check_present, choose_device
    from text_generation_inference.make_quantized.make import Maker, Source, check_plain
    from text_generation_inference.make_quantized.output import Output
    from text_generation_inference.models.registry import judge
    from text_generation_inference.text.tokenizer import Tokenizer
    from text_generation_inference.text.windows import cut, read_text
    from text_generation_inference.weights.source import find_model

    settings = _read_settings(options)
    given = CALIBRATION if options.calibration is None else expand_home(options.calibration, "calibration")
    text = read_text(given, "--calibration")
    output = Output(expand_home(options.output_dir, "output_dir"))
    output.check_free()  # before anything is fetched
    check_present(config)
    with StageBars() as bars:
        lines = _Lines(options, bars)

        def refuse(folder: Path) -> None:
            judge(folder, config.trust_remote_code)
            check_plain(folder)

        source = find_model(config, lines.progress, judge=refuse)
        device = choose_device(config.device, cache_folder(config), False, config.num_threads, 1.0, config)
        maker = Maker(
            Source(source.path, source.weights_path, config.trust_remote_code),
            output,
            settings,
            device,
            options.batch_size,
            None if options.dtype is None else getattr(torch, options.dtype),
            int(options.max_shard_gb * _GIGABYTE),
            lines.progress,
            lines.tell,
        )
        length = min(settings.sequence_length, maker.max_positions)
        if length < settings.sequence_length:
            lines.warn(
                f"--sequence-length is {length} instead of {settings.sequence_length}: the model has no more positions"
            )
        windows = cut(Tokenizer.load(source.path), text, length)[: settings.num_samples]
        lines.tell(f"{sum(map(len, windows))} tokens of {given}, in {len(windows)} windows")
        try:
            made = maker.run(windows)
        except KeyboardInterrupt:
            bars.stop()
            lines.warn(f"interrupted: {maker.describe_progress()}")
            return EXIT_INTERRUPTED
        device.close()
    _say(made, options.output_dir)
    return 0


def _say(made: "Made", folder: str) -> None:
    for note in made.notes:
        print(note, file=sys.stderr)
    reasons: dict[str, list[str]] = {}
    for kept in made.kept:
        if kept.reason:
            reasons.setdefault(kept.reason, []).extend(kept.names)
    for reason, names in reasons.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        print(f"as they were stay {', '.join(names[:_SHOWN])}{more}: {reason}", file=sys.stderr)
    print(f"{made.num_matrices} matrices are quantised; {made.num_bytes / 1e6:.0f} MB of weights are in {folder}")
