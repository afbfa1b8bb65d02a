"""The `tgi` command.

`tgi generate` answers prompts without a server; `serve`, `check` and `download` are the commands of `launch`,
`bench` is that of `bench`, `ray` that of `ray_serve`.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from text_generation_inference.bench import command as bench_command
from text_generation_inference.config import ENGINE_SETTINGS, SETTINGS, ServerConfig, prepare_process, read_environment
from text_generation_inference.errors import TgiError
from text_generation_inference.launch import check, command, server_command
from text_generation_inference.ray_serve import command as ray_command
from text_generation_inference.types import SamplingParams
from text_generation_inference.version import __version__

if TYPE_CHECKING:
    from text_generation_inference.llm import LLM

EXIT_ERROR, EXIT_INTERRUPTED = 1, 130
AddArgument = Callable[..., argparse.Action]  # of a parser or a group
_OTHER_COMMANDS = {
    "serve": "serve a model over HTTP (the same as text-generation-launcher)",
    "ray": "serve a model by replicas on a Ray cluster",
    "check": "say whether a model runs here, and with which limits",
    "download": "fetch a model from the hub",
    "bench": "measure how fast a model runs here or a server answers, and show reports",
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    match arguments:
        case ["serve", *rest]:
            return command.main(rest, prog="tgi serve")
        case ["ray", *rest]:
            return ray_command.main(rest)
        case ["check", *rest]:
            return check.main(rest)
        case ["download", *rest]:
            return server_command.download_main(rest)
        case ["bench", *rest]:
            return bench_command.main(rest)
        case _:
            pass
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if options.system is not None and not options.chat:
        parser.error("--system needs --chat")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a mark
    try:
        return options.run(options)
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; nothing more to say to it
        return EXIT_ERROR
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


class _DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, unless the help says so in words or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []) or "default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tgi", description="Text Generation Inference")
    parser.add_argument("-V", "--version", action="version", version=f"tgi {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in _OTHER_COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    generate = commands.add_parser(
        "generate",
        help="answer prompts without a server",
        description="Answer prompts from the arguments or, without any, from standard input (one per line).",
        formatter_class=_DefaultsFormatter,
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; '-' reads lines from standard input")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt, with tokens and logprobs")
    generate.add_argument("--chat", action="store_true", help="treat each prompt as a user's message in a chat")
    generate.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    generate.add_argument("-q", "--quiet", action="store_true", help="no progress and no summary")
    _add_model_options(generate.add_argument_group("model").add_argument)
    _add_sampling_options(generate.add_argument_group("sampling").add_argument)
    return parser


def _add_model_options(add: AddArgument) -> None:
    add("--model", help="embedded, a model folder, a .gguf file, or a hub id (default: embedded)")
    add("--revision", help="hub revision (default: main)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="(default: the device's best)")
    add("--device", help=f"{SETTINGS['device'].help} (default: auto)")
    add("--load-format", choices=("safetensors", "dummy"), help="dummy: random weights from the config")
    add("--max-total-tokens", type=int, metavar="N", help="longest prompt and answer together")
    add("--max-batch-total-tokens", type=int, metavar="N", help="tokens in the KV cache")
    add("--max-batch-prefill-tokens", type=int, metavar="N", help="prompt tokens computed in one step")
    add("--max-batch-size", type=int, metavar="N", help="prompts computed at a time")
    add(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        default=None,
        help="compute every prompt in full",
    )
    add("--no-custom-kernels", dest="custom_kernels", action="store_false", default=None, help="torch only")
    add("--cache-dir", metavar="DIR", help="converted models and kernels (default: ~/.cache/tgi)")
    add("--num-threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def _add_sampling_options(add: AddArgument) -> None:
    add("-n", "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer")
    add("--temperature", type=float, default=1.0, help="not 1: sample from flatter or sharper scores")
    add("--top-k", type=int, default=0, help="keep the k best; 0: off")
    add("--top-p", type=float, default=1.0, help="keep the likeliest that hold this mass")
    add("--typical-p", type=float, default=1.0, help="keep the most typical that hold this mass")
    add("--min-p", type=float, default=0.0, help="drop those less likely than this share of the best")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repetitions")
    add("--frequency-penalty", type=float, default=0.0, help="-2 to 2")
    add("--presence-penalty", type=float, default=0.0, help="-2 to 2")
    add("--do-sample", action="store_true", help="sample although no option above asks for it")
    add("--seed", type=int, help="same seed, same answer (default: random)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    add("--ignore-eos", action="store_true", help="go on after the model says it is done")
    add("--watermark", action="store_true", help="mark the text as generated")
    add("--best-of", type=int, default=1, metavar="N", help="sample N answers, keep the likeliest")
    add("--top-n-tokens", type=int, default=0, metavar="N", help="report the N best at each step (--json)")
    add("--decoder-input-details", action="store_true", help="logprobs of the prompt (--json)")


def _generate(options: argparse.Namespace) -> int:
    fields = [field.name for field in msgspec.structs.fields(SamplingParams)]
    params = SamplingParams(**{name: getattr(options, name) for name in fields if hasattr(options, name)})
    params.check()
    prompts = list(_read_prompts(options.prompts))
    if not prompts:
        print("error: no prompt: give one as an argument or on standard input", file=sys.stderr)
        return EXIT_ERROR
    settings = {field.name: getattr(options, field.name, None) for field in msgspec.structs.fields(ServerConfig)}
    settings = {name: value for name, value in settings.items() if value is not None}
    settings.pop("seed", None)  # of the sampling, not of dummy weights
    prepare_process(ServerConfig(**{**read_environment(only=ENGINE_SETTINGS), **settings}))
    from text_generation_inference.llm import LLM  # loads torch, which takes seconds: mistakes above are told at once

    model = options.model or read_environment(only=["model_id"]).get("model_id") or "embedded"
    with LLM(str(model), progress=not options.quiet, **settings) as llm:
        if not options.quiet:
            print(f"{llm.facts.model_id}: {'; '.join(llm.notes)}", file=sys.stderr)
        if options.chat:
            system = [{"role": "system", "content": options.system}] if options.system else []
            prompts = [llm.render_chat([*system, {"role": "user", "content": prompt}]) for prompt in prompts]
        if len(prompts) == 1 and not options.json and params.best_of == 1:
            return _stream_one(llm, prompts[0], params, options)
        return _answer_all(llm, prompts, params, options)


def _read_prompts(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments or ["-"]:
        if argument == "-":
            if sys.stdin is None:
                return
            if sys.stdin.isatty():
                print("Type prompts, one per line; end with Ctrl-D.", file=sys.stderr)
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        else:
            yield argument


def _stream_one(llm: "LLM", prompt: str, params: SamplingParams, options: argparse.Namespace) -> int:
    start = first = time.perf_counter()
    num_tokens = 0
    for token in llm.stream(prompt, params, add_special_tokens=not options.chat):
        if not num_tokens:
            first = time.perf_counter()
        num_tokens += 1
        print(token.text, end="", flush=True)
    print()
    if not options.quiet:
        rate = (num_tokens - 1) / max(time.perf_counter() - first, 1e-9)
        print(f"{num_tokens} tokens, first after {first - start:.2f} s, then {rate:.0f} tokens/s", file=sys.stderr)
    return 0


def _answer_all(llm: "LLM", prompts: list[str], params: SamplingParams, options: argparse.Namespace) -> int:
    completions = llm.generate(prompts, params, add_special_tokens=not options.chat)
    for prompt, completion in zip(prompts, completions, strict=True):
        if options.json:
            line = {"prompt": prompt, **msgspec.to_builtins(completion)}
            print(msgspec.json.encode(line).decode())
        elif completion.error:
            print(f"error: {completion.error}", file=sys.stderr)
        else:
            print(completion.text)
    return EXIT_ERROR if any(completion.error for completion in completions) else 0


if __name__ == "__main__":
    sys.exit(main())
