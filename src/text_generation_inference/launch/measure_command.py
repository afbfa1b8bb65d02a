"""`text-generation-server measure`: runs a text through a model and writes the largest values of its tensors.

The engine runs in this process. Ctrl-C ends it and leaves files of an earlier measurement alone. Loads torch
only when there is work.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from text_generation_inference.config import (
    ENGINE_SETTINGS,
    SETTINGS,
    ServerConfig,
    parse_value,
    prepare_process,
    read_environment,
)
from text_generation_inference.drive import run_requests
from text_generation_inference.errors import StartError
from text_generation_inference.launch.command import EXIT_USAGE, run_guarded
from text_generation_inference.progress import StageBars

if TYPE_CHECKING:
    from text_generation_inference.engine.build import Engine

_SECONDS_BETWEEN_LINES = 5.0
_PROMPTS_AT_A_TIME = 16
_FLAGS = ("model_id", "revision", "quant_config", "device", "dtype")


def main(arguments: Sequence[str], prog: str = "text-generation-server measure") -> int:
    options = _build_parser(prog).parse_args(arguments)
    try:
        given = read_environment(only={*ENGINE_SETTINGS, *_FLAGS})
        for name in _FLAGS:
            if getattr(options, name) is not None:
                given[name] = parse_value(name, getattr(options, name), f"--{name.replace('_', '-')}")
        if not given.get("quant_config"):
            raise StartError("--quant-config is missing: the JSON file, with `mode` MEASURE, that says what to measure")
        for name, least in (("window", 2), ("max_prompts", 1), ("max_new_tokens", 1)):
            value = getattr(options, name)
            if value is not None and value < least:
                raise StartError(f"--{name.replace('_', '-')} must be >= {least}. Given: {value}")
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_guarded(lambda: _run(given, options))


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run a text through a model and write the largest values of its tensors, from which FP8 is served"
        " with static scales.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-id", help="embedded, a folder, a .gguf file or a hub id [env: MODEL_ID]")
    parser.add_argument("--revision", help="commit, branch, tag or refs/pr/N [env: REVISION]")
    parser.add_argument("--quant-config", metavar="FILE", help="JSON with `mode` MEASURE [env: QUANT_CONFIG]")
    parser.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text of the kind that will be served")
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of each prompt (default: 512)")
    parser.add_argument("--max-prompts", type=int, metavar="N", help="prompts at most (default: all of the text)")
    parser.add_argument("--max-new-tokens", type=int, default=1, metavar="N", help="generated each (default: 1)")
    parser.add_argument("--device", help=f"{SETTINGS['device'].help} [env: TGI_DEVICE]")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the device's) [env: DTYPE]")
    return parser


def _run(given: dict[str, Any], options: argparse.Namespace) -> int:
    prepare_process(ServerConfig(**given))
    from text_generation_inference.engine.build import start_engine
    from text_generation_inference.quant.inc.config import read_calibration
    from text_generation_inference.text.tokenizer import Tokenizer
    from text_generation_inference.text.windows import cut, read_text

    text = read_text(Path(options.text), "--text")
    file = read_calibration(Path(given["quant_config"]))
    if file.mode != "MEASURE":
        raise StartError(f"{file.source}: `mode` is {file.mode}, but to measure it must be MEASURE")
    longest = options.window + options.max_new_tokens
    given |= {"prefix_caching": False, "max_total_tokens": longest, "max_batch_size": _PROMPTS_AT_A_TIME}
    given |= {"max_input_tokens": None, "max_batch_total_tokens": 2 * _PROMPTS_AT_A_TIME * longest}
    with StageBars() as bars:
        try:
            engine = start_engine(ServerConfig(**given), bars.update)
        except StartError as error:
            named = " (--window and --max-new-tokens together)" if "`max_total_tokens`" in str(error) else ""
            raise StartError(f"{error}{named}") from None
        recorder, engine.recorder = engine.recorder, None  # written here, and only if all goes well
        assert recorder is not None
        try:
            for note in engine.notes:
                print(note, file=sys.stderr)
            prompts = cut(Tokenizer.load(engine.folder), text, options.window)[: options.max_prompts]
            measure(engine, prompts, options.max_new_tokens, _MeasureProgress(bars).update)
        finally:
            engine.close()
    path = recorder.save()
    tokens = sum(map(len, prompts))
    print(f"{tokens} tokens of {len(prompts)} prompts; {len(recorder.read())} modules are in {path}")
    return 0


def _tell_nobody(done: int, total: int) -> None:
    pass


def measure(
    engine: "Engine", prompts: list[list[int]], new_tokens: int = 1, tell: Callable[[int, int], None] = _tell_nobody
) -> None:
    """Run prompts through an engine that measures. Ctrl-C takes effect between steps."""
    from text_generation_inference.types import GenerationRequest, SamplingParams

    requests = [
        GenerationRequest(
            id=number,
            token_ids=prompt,
            sampling=SamplingParams(),
            max_new_tokens=new_tokens,
            stop_token_ids=[],
            seed=0,
        )
        for number, prompt in enumerate(prompts)
    ]
    done = 0
    tell(0, len(prompts))
    for out in run_requests(engine.loop, requests, lambda number: f"prompt {number + 1} of {len(prompts)}"):
        if out.finished:
            done += len(out.finished)
            tell(done, len(prompts))


class _MeasureProgress:
    """A bar on a terminal, else a line every few seconds, with the time that is left."""

    def __init__(self, bars: StageBars) -> None:
        self._bars = bars
        self._started = self._told = time.monotonic()

    def update(self, done: int, total: int) -> None:
        self._bars.update("measure", done, total)
        now = time.monotonic()
        if done and not sys.stderr.isatty() and now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            left = (total - done) * (now - self._started) / done
            print(f"measure: {done} of {total} prompts, {left:.0f} s left", file=sys.stderr, flush=True)
