"""The command `text-generation-server`: fetches weights ahead of time, quantises a model, and measures one for FP8.

TGI's command of this name also runs a shard; here the launcher runs everything itself, so that sub-command only says
what to use instead.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from text_generation_inference.config import ServerConfig, read_environment
from text_generation_inference.errors import StartError
from text_generation_inference.launch.command import EXIT_USAGE, run_guarded
from text_generation_inference.version import __version__

ALREADY_PRESENT = "Files are already present on the host. Skipping download."
_SECONDS_BETWEEN_LINES = 5.0
_MEASURE = "find the largest values of a model's tensors, for FP8 with static scales"
_QUANTIZE = "make a checkpoint in GPTQ of a model"
_INSTEAD = {
    "serve": "is no program of its own here: run text-generation-launcher, which starts everything it needs",
}


def main(arguments: Sequence[str] | None = None, prog: str = "text-generation-server") -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in _INSTEAD:
        print(f"error: {prog} {arguments[0]} {_INSTEAD[arguments[0]]}", file=sys.stderr)
        return EXIT_USAGE
    if arguments and arguments[0] == "measure":
        from text_generation_inference.launch import measure_command

        return measure_command.main(arguments[1:], f"{prog} measure")
    if arguments and arguments[0] == "quantize":
        from text_generation_inference.launch import quantize_command

        return quantize_command.main(arguments[1:], f"{prog} quantize")
    return _run_download(_build_parser(prog).parse_args(arguments))


def download_main(arguments: Sequence[str]) -> int:
    """`download-weights` as a command of its own."""
    parser = argparse.ArgumentParser(prog="tgi download", description="Fetch a model from the hub into the cache.")
    _add_download_options(parser)
    return _run_download(parser.parse_args(arguments))


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Fetch the weights of a model.", allow_abbrev=False)
    parser.add_argument("-V", "--version", action="version", version=f"{prog} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    download = commands.add_parser("download-weights", help="fetch a model from the hub into the cache")
    _add_download_options(download)
    commands.add_parser("measure", help=_MEASURE)
    commands.add_parser("quantize", help=_QUANTIZE)
    for name, text in _INSTEAD.items():
        commands.add_parser(name, help=text)
    return parser


def _add_download_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_id", metavar="MODEL_ID", help="a model on the hub")
    parser.add_argument("--revision", help="commit, branch, tag or refs/pr/N [env: REVISION]")
    parser.add_argument("--extension", default=".safetensors", help="kind of weights; only .safetensors are fetched")
    parser.add_argument("--logger-level", default="INFO", help="WARNING or ERROR: no progress lines")
    parser.add_argument("--json-output", action=argparse.BooleanOptionalAction, help="progress as JSON lines")
    no_effect = "no effect: pickled weights are never opened"
    parser.add_argument("--auto-convert", action=argparse.BooleanOptionalAction, help=no_effect)
    trusts = "fetch code that comes with the model too [env: TRUST_REMOTE_CODE]"
    parser.add_argument("--trust-remote-code", action=argparse.BooleanOptionalAction, default=None, help=trusts)
    parser.add_argument("--merge-lora", action=argparse.BooleanOptionalAction, help="merge an adapter: not supported")


_DOWNLOAD_SETTINGS = ("revision", "huggingface_hub_cache", "offline", "cache_dir", "trust_remote_code")


def _run_download(options: argparse.Namespace) -> int:
    """Download what the options name; the exit status."""
    try:
        given = read_environment(only=_DOWNLOAD_SETTINGS)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    given["model_id"] = options.model_id
    if options.trust_remote_code is not None:
        given["trust_remote_code"] = options.trust_remote_code
    if options.revision is not None:
        given["revision"] = options.revision
    tell = _ProgressLines(options.json_output, options.logger_level.upper() in ("TRACE", "DEBUG", "INFO"))
    return run_guarded(lambda: _download(ServerConfig(**given), options.extension, tell))


class _ProgressLines:
    """Progress as lines on standard error: at most one every few seconds."""

    def __init__(self, as_json: bool, enabled: bool) -> None:
        self._as_json, self._enabled = as_json, enabled
        self._started = time.monotonic()
        self._next = self._started + _SECONDS_BETWEEN_LINES

    def say(self, text: str, level: str = "INFO") -> None:
        if self._enabled or level == "ERROR":
            line = msgspec.json.encode({"level": level, "message": text}).decode() if self._as_json else text
            print(line, file=sys.stderr, flush=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next or not done:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        left = (total - done) * (now - self._started) / done
        self.say(f"Download: [{done / 1e6:.0f}/{total / 1e6:.0f} MB] -- ETA: {left:.0f} s")


def _download(config: ServerConfig, extension: str, tell: _ProgressLines) -> int:
    from text_generation_inference.weights import embedded
    from text_generation_inference.weights.model_files import explain_pickles
    from text_generation_inference.weights.source import find_model

    if extension != ".safetensors":
        raise StartError(
            f"`extension` {extension!r} is not supported: only .safetensors are fetched. "
            f"{explain_pickles(config.model_id)}"
        )
    if config.model_id == embedded.NAME or os.path.exists(os.path.expanduser(config.model_id)):
        tell.say(ALREADY_PRESENT)
        return 0
    missing = _missing_bytes(config)
    if missing == 0:
        find_model(config)  # raises when something is amiss with what is there
        tell.say(ALREADY_PRESENT)
        return 0
    if missing is not None:
        tell.say(f"Download: {missing / 1e6:.1f} MB of {config.model_id}")
    found = find_model(config, tell.progress)
    tell.say(f"Files are in {found.path}")
    return 0


def _missing_bytes(config: ServerConfig) -> int | None:
    """Bytes that are not in the cache yet; None when the hub does not tell."""
    from text_generation_inference.weights.download import list_files
    from text_generation_inference.weights.source import hub_access

    if config.offline:
        return 0
    try:
        files = list_files(config.model_id, config.revision, hub_access(config))
    except StartError:
        return None  # the cache may be complete all the same; if not, the download tells what is wrong
    return sum(max(1, file.num_bytes) for file in files if not file.is_cached)


if __name__ == "__main__":
    sys.exit(main())
