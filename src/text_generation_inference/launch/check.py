"""The command `tgi check`: will this model run here, and with which limits? Answers in seconds and loads no weights.

Reads the model's config and the headers of its weight files, locally or from the hub, and asks the same parts
that start an engine: the registry, the model's declared tensors, the device and `resolve`. Those import torch, so they
are imported when a model is looked at.
"""

import os
import shutil
import sys
from collections.abc import Sequence

import msgspec

from text_generation_inference.config import ServerConfig, prepare_process
from text_generation_inference.devices import visible
from text_generation_inference.devices.driver import read_driver
from text_generation_inference.errors import TgiError
from text_generation_inference.launch.arguments import build_parser, read_arguments
from text_generation_inference.launch.check_facts import look_at
from text_generation_inference.launch.check_report import Report, render
from text_generation_inference.launch.command import EXIT_ERROR, EXIT_USAGE, run_guarded
from text_generation_inference.units import gigabytes


def main(arguments: Sequence[str] | None = None, prog: str = "tgi check") -> int:
    try:
        parser = build_parser(prog, "Say whether a model runs on this machine, and with which limits.")
        parser.usage = "%(prog)s [OPTIONS] [MODEL]"
        parser.add_argument("model", nargs="?", metavar="MODEL", help="as --model-id")
        parser.add_argument("--json", action="store_true", default=False, help="the report as JSON")
        options = parser.parse_args(arguments)
        launch = read_arguments(options, os.environ, needs_cards=False)
        config = launch.config
        if getattr(options, "model", None) is not None:
            config = msgspec.structs.replace(config, model_id=options.model)
            config.check()
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_guarded(lambda: _run(config, launch.notes, options.json))


def _run(config: ServerConfig, notes: list[str], as_json: bool) -> int:
    report = check_model(config)
    report.notes = [*notes, *report.notes]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else render(report, width))
    return 0 if report.fits else EXIT_ERROR


def check_model(config: ServerConfig) -> Report:
    """Everything that can be said; a failure on the way ends the report and is its last problem."""
    prepare_process(config)
    report = Report(model=config.model_id, gpu=_look_at_gpu(config.num_shard or 1) if config.device != "cpu" else {})
    try:
        facts = look_at(config)
        from text_generation_inference.launch.check_fit import fill  # with torch, once a model is there

        fill(report, config, facts)
        visible.check_cards(config, os.environ)
    except TgiError as error:
        report.problems = [*report.problems, str(error).removeprefix("Invalid argument: ")]
    report.fits = not report.problems
    return report


def _look_at_gpu(num_ranks: int) -> dict[str, str]:
    driver = read_driver()
    if not driver.gpus:
        return {}
    gpu = driver.gpus[0]
    features = ["bfloat16" if gpu.capability >= (8, 0) else "no bfloat16"]
    features.append("FP8" if gpu.capability >= (8, 9) else "no FP8")
    facts = {
        "name": gpu.name,
        "memory": gigabytes(gpu.memory_bytes),
        "capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "features": ", ".join(features),
        "driver": driver.runs or "unknown",
    }
    if len(driver.gpus) > 1:
        facts["others"] = f"{len(driver.gpus) - 1}{', not used' if num_ranks == 1 else ''}"
    return facts


if __name__ == "__main__":
    sys.exit(main())
