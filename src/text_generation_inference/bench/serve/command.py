"""The command `tgi bench serve`: how fast does a server answer? Reads the flags and says what is wrong with them.

Flags are named as in inference-benchmarker where it has them; `run` does the work.
"""

import math
import os
import re
from collections.abc import Sequence

import msgspec

from text_generation_inference.bench.command_line import Parser, check_range, run
from text_generation_inference.bench.serve.modes import Modes
from text_generation_inference.bench.serve.profiles import PROFILES, QUICK, Lengths, exactly, parse_lengths
from text_generation_inference.config import read_environment
from text_generation_inference.errors import StartError

APIS = ("auto", "generate", "completions", "chat")
MODES = ("sweep", "rate", "throughput")
LIMITS = ("ttft", "itl", "tpot", "e2e")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_USERS, _MOST_RATE, _MOST_PROCESSES, _MOST_REQUESTS = 100_000, 100_000.0, 256, 1_000_000


class Load(msgspec.Struct, frozen=True):
    """How hard and how long, unless flags say otherwise."""

    users: int
    num_rates: int
    seconds: float
    warmup: str


# 5 s + 10 s + 4 x 10 s, and what answers take to end; a profile of inference-benchmarker brings its figures along.
_QUICK, _PUBLISHED = Load(16, 4, 10.0, "5s"), Load(128, 10, 120.0, "30s")


class ServeTask(msgspec.Struct, kw_only=True):
    """What was asked for, checked as far as can be without the server."""

    url: str
    api: str
    api_key: str | None
    model_name: str | None
    tokenizer: str | None
    revision: str | None
    profile: str
    prompt: Lengths
    prompt_is_given: bool  # else texts from a file are taken as they are
    output: Lengths
    ignore_eos: bool
    prompts_path: str | None
    shared_prefix: int
    modes: Modes
    seed: int | None  # None: another one each time
    timeout_s: float
    limits_ms: dict[str, float]
    client_processes: int
    extra: dict[str, str]
    json_path: str | None
    details: bool
    quiet: bool


def main(arguments: Sequence[str], prog: str = "tgi bench serve") -> int:
    def work(task: ServeTask) -> int:
        from text_generation_inference.bench.serve.run import run_serve  # mistakes above are told at once

        return run_serve(task)

    return run(lambda: read_task(arguments, prog), work, "interrupted before anything was measured")


def read_task(arguments: Sequence[str], prog: str = "tgi bench serve") -> ServeTask:
    """Raises `StartError` naming the first flag that makes no sense."""
    options = _build_parser(prog).parse_args(list(arguments))
    profile = QUICK if options.profile is None else PROFILES[options.profile]
    prompt, output = profile.prompt, profile.output
    if options.prompt_options is not None:
        prompt = parse_lengths(options.prompt_options, "--prompt-tokens")
    if options.decode_options is not None:
        output = parse_lengths(options.decode_options, "--output-tokens")
    if options.max_new_tokens is not None:
        if options.decode_options is not None:
            raise StartError("--max-new-tokens and --output-tokens both say how long answers are: leave one out")
        check_range("--max-new-tokens", options.max_new_tokens, 1, 10_000_000)
        output = exactly(options.max_new_tokens)
    if options.ignore_eos and options.api == "generate":
        raise StartError(
            "--ignore-eos: TGI's own API cannot go on after an end token; use --api completions or --api chat"
        )
    check_range("--shared-prefix", options.shared_prefix, 0)
    if options.shared_prefix and options.prompts is not None:
        raise StartError("--shared-prefix is about prompts made here: leave it or --prompts out")
    environment = read_environment(only=("api_key",))
    return ServeTask(
        url=options.url,
        api=options.api,
        api_key=_check_key(options.api_key or environment.get("api_key")),
        model_name=options.model_name,
        tokenizer=options.tokenizer_name,
        revision=options.revision,
        profile=options.profile or "quick",
        prompt=prompt,
        prompt_is_given=options.prompt_options is not None,
        output=output,
        ignore_eos=options.ignore_eos,
        prompts_path=options.prompts,
        shared_prefix=options.shared_prefix,
        modes=_read_modes(options),
        seed=options.seed,
        timeout_s=_above_zero(parse_seconds(options.timeout, "--timeout"), "--timeout"),
        limits_ms=parse_limits(options.limit),
        client_processes=_processes(options.client_processes),
        extra=_parse_pairs(options.extra_meta),
        json_path=options.json,
        details=options.details,
        quiet=options.quiet,
    )


def _read_modes(options) -> Modes:  # noqa: ANN001 - argparse's namespace
    usual = _QUICK if options.profile is None else _PUBLISHED
    users = usual.users if options.max_vus is None else options.max_vus
    num_rates = usual.num_rates if options.num_rates is None else options.num_rates
    check_range("--max-vus", users, 1, _MOST_USERS)
    check_range("--num-rates", num_rates, 1, 1000)
    rates = [rate for text in options.rates or [] for rate in _parse_rates(text)]
    if options.benchmark_kind == "rate" and not rates:
        raise StartError("--benchmark-kind rate needs at least one --rates, such as --rates 1.5")
    if options.benchmark_kind != "rate" and rates:
        raise StartError(f"--rates are for --benchmark-kind rate, not {options.benchmark_kind}")
    if options.num_requests is not None:
        check_range("--num-requests", options.num_requests, 1, _MOST_REQUESTS)
    seconds = None if options.duration is None else parse_seconds(options.duration, "--duration")
    if seconds is None and options.num_requests is None:
        seconds = usual.seconds
    if options.num_requests is None and max(rates, default=0) * (seconds or 0) > _MOST_REQUESTS:
        raise StartError(f"--rates and --duration ask for more than {_MOST_REQUESTS:,} requests: shorten it")
    return Modes(
        mode=options.benchmark_kind,
        arrivals=options.arrivals,
        users=users,
        seconds=None if seconds is None else _above_zero(seconds, "--duration"),
        warmup_seconds=parse_seconds(options.warmup or usual.warmup, "--warmup"),
        rates=rates,
        num_rates=num_rates,
        num_requests=options.num_requests,
    )


def _build_parser(prog: str) -> Parser:
    parser = Parser(
        prog,
        usage="%(prog)s --url URL [OPTIONS]",
        description="Measure a server over HTTP, TGI's or any with OpenAI's streaming API: time to the first token,"
        " time between tokens, requests and tokens per second. Without options it ends after a minute or two; with a"
        " --profile of inference-benchmarker it takes that program's 23 minutes unless --duration says otherwise. What"
        " each column means: docs/benchmarking.md.",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://localhost:3000", help="default: %(default)s; https too")
    server.add_argument("--api", choices=APIS, default="auto", help="default: auto, asks the server")
    server.add_argument("--api-key", metavar="KEY", help="sent as bearer token (default: environment variable API_KEY)")
    server.add_argument("--model-name", metavar="NAME", help="sent by OpenAI's APIs (default: what the server names)")
    work = parser.add_argument_group("requests")
    work.add_argument(
        "--tokenizer-name",
        "--tokenizer",
        metavar="MODEL",
        help="whose tokens are counted: a model folder, a .gguf file, embedded, or a model on the hub"
        " (default: the server's model)",
    )
    work.add_argument("--revision", metavar="NAME", help="commit, branch or tag of the tokenizer on the hub")
    lengths = "; ".join(f"{name}: {profile.prompt} in, {profile.output} out" for name, profile in PROFILES.items())
    work.add_argument(
        "--profile", choices=list(PROFILES), help=f"{lengths} (default: {QUICK.prompt} in, {QUICK.output} out)"
    )
    work.add_argument(
        "--prompt-tokens",
        "--prompt-options",
        dest="prompt_options",
        metavar="N",
        help="length of prompts: a number, or num_tokens=N,min_tokens=N,max_tokens=N,variance=N",
    )
    work.add_argument(
        "--output-tokens",
        "--decode-options",
        dest="decode_options",
        metavar="N",
        help="most tokens of an answer, in the same forms",
    )
    work.add_argument("--max-new-tokens", type=int, metavar="N", help="the same number for every answer")
    work.add_argument(
        "--ignore-eos", action="store_true", help="answers have exactly that length (OpenAI's APIs, as vLLM spells it)"
    )
    work.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON list of texts, of {prompt, max_new_tokens}, or of {conversations: [{role, content}]}",
    )
    work.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts begin with")
    work.add_argument("--seed", type=int, metavar="N", help="of prompts and arrivals (default: another one each time)")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--benchmark-kind",
        "--mode",
        dest="benchmark_kind",
        choices=MODES,
        default="sweep",
        help="sweep (default): warm-up, maximum, then rates up to 1.2 times that; rate: at given rates; throughput:"
        " users, each with one request at a time",
    )
    load.add_argument(
        "--max-vus", type=int, metavar="N", help="users of the maximum (default: 16; with --profile: 128)"
    )
    load.add_argument(
        "--rates", action="append", metavar="X", help="requests per second; again or with commas for more"
    )
    load.add_argument("--num-rates", type=int, metavar="N", help="of a sweep (default: 4; with --profile: 10)")
    load.add_argument("--arrivals", choices=("constant", "poisson"), default="constant", help="default: constant")
    load.add_argument(
        "--duration", metavar="TIME", help="of each phase, such as 30s or 2m (default: 10s; with --profile: 120s)"
    )
    load.add_argument("--warmup", metavar="TIME", help="with one user; 0: none (default: 5s; with --profile: 30s)")
    load.add_argument("--num-requests", type=int, metavar="N", help="in each phase, in place of --duration or at most")
    load.add_argument(
        "--timeout", default="600s", metavar="TIME", help="a request that has not ended by then failed (default: 600s)"
    )
    load.add_argument(
        "--client-processes", type=int, metavar="N", help="that send and receive (default: by cores, 1 to 4)"
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--limit", metavar="LIST", help="goodput: requests within such as ttft=200ms,itl=50ms,tpot=30ms,e2e=10s"
    )
    results.add_argument("--json", metavar="FILE", help="also write everything there, after each phase")
    results.add_argument("--details", action="store_true", help="every request and gap in the JSON file")
    results.add_argument("--extra-meta", metavar="LIST", help="key=value,... to keep with the results")
    results.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser


def parse_seconds(text: str, flag: str) -> float:
    """`90`, `90s`, `1.5m`, `1m30s`, `250ms`. Raises `StartError`."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?|([0-9]+(\.[0-9]+)?(ms|s|m|h))+", text, re.ASCII) or len(text) > 30:
        raise StartError(f"{flag} {text!r} is no time: say 90, 90s, 2m or 1m30s")
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)?", text)
    return sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)


def parse_limits(text: str | None) -> dict[str, float]:
    """In milliseconds; a number without unit is milliseconds."""
    limits: dict[str, float] = {}
    for item in text.split(",") if text is not None else []:
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in LIMITS or not value:
            raise StartError(
                f"--limit {text!r} must be a list of ttft=, itl=, tpot= or e2e=, such as ttft=200ms,e2e=10s"
            )
        plain = re.fullmatch(r"[0-9]+(\.[0-9]+)?", value, re.ASCII)
        limits[name] = float(value) if plain else 1e3 * parse_seconds(value, f"--limit {name}=")
    return limits


def _parse_rates(text: str) -> list[float]:
    rates: list[float] = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not 0 < rate <= _MOST_RATE:
            raise StartError(f"--rates {text!r} must be requests per second above 0, such as 0.5 or 1,2,4")
        rates.append(rate)
    return rates


def _parse_pairs(text: str | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in text.split(",") if text else []:
        key, sign, value = item.partition("=")
        if not key.strip() or not sign:
            raise StartError(f"--extra-meta {text!r} must be a list of key=value")
        pairs[key.strip()] = value.strip()
    return pairs


def _processes(given: int | None) -> int:
    if given is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return 4 if cores >= 16 else 2 if cores >= 8 else 1
    check_range("--client-processes", given, 1, _MOST_PROCESSES)
    return given


def _check_key(key: str | None) -> str | None:
    if key is not None and not re.fullmatch(r"[\x21-\x7e]+", key):
        raise StartError("--api-key must be one word of plain characters")
    return key


def _above_zero(seconds: float, flag: str) -> float:
    if seconds <= 0:
        raise StartError(f"{flag} must be above 0")
    return seconds
