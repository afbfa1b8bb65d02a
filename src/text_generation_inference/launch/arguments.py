"""The flags of `text-generation-launcher`: one table, from which come the parser, the help and the configuration.

Types, defaults and the names of environment variables are those of `ServerConfig`; a flag beats its variable,
which beats the default. `read_arguments` is pure but for counting devices when `--sharded true` asks for it.
"""

import argparse
import ipaddress
import shutil
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from text_generation_inference.config import ALIASES, SECRETS, ServerConfig, parse_value, read_environment, variable_of
from text_generation_inference.errors import StartError
from text_generation_inference.launch import effects, variables
from text_generation_inference.version import __version__


class Flag(msgspec.Struct, frozen=True):
    """A flag that sets the field of `ServerConfig` with its name, unless `field` names another."""

    name: str
    help: str
    value: str = ""  # what is shown for its value; empty: a switch
    field: str = ""
    sets: bool = True  # what a switch sets
    short: str = ""
    default: str = ""  # in words, where the default is derived

    @property
    def target(self) -> str:
        return self.field or self.name[2:].replace("-", "_")


FLAGS: dict[str, list[Flag]] = {
    "model": [
        Flag("--model-id", "embedded, a model folder, a .gguf file, or a model on the Hugging Face hub", "MODEL"),
        Flag("--revision", "commit, branch, tag or refs/pr/N on the hub", "NAME", default="main"),
        Flag("--dtype", "type of the weights on the device", "TYPE", default="the device's best"),
        Flag("--quantize", "fp8: matrices in FP8; others are refused", "METHOD", default="as the checkpoint is"),
        Flag("--kv-cache-dtype", "fp8_e4m3fn: keys and values in FP8", "TYPE", default="the model's"),
        Flag("--quant-config", "JSON file: what to measure, or the measured scales to serve in FP8 with", "FILE"),
        Flag("--load-format", "dummy: random weights from config.json alone", "FORMAT"),
        Flag("--tokenizer-config-path", "a file that replaces the model's tokenizer_config.json", "FILE"),
        Flag("--weights-cache-override", "take the .safetensors files of this folder instead of the model's", "DIR"),
        Flag("--disable-grammar-support", "refuse requests with a grammar"),
        Flag("--watermark-gamma", "share of the vocabulary that a watermark prefers", "X"),
        Flag("--watermark-delta", "how strongly a watermark prefers it", "X"),
    ],
    "limits of a request": [
        Flag("--max-input-tokens", "longest prompt", "N", default="max-total-tokens - 1"),
        Flag("--max-input-length", "older name of --max-input-tokens", "N"),
        Flag("--max-total-tokens", "longest prompt and answer together", "N", default="from the model and memory"),
        Flag("--max-best-of", "most candidates of best_of", "N"),
        Flag("--max-stop-sequences", "most stop sequences", "N"),
        Flag("--max-top-n-tokens", "most alternatives reported for a token", "N"),
        Flag("--max-client-batch-size", "told by /info alone: no native route takes several prompts", "N"),
        Flag("--payload-limit", "bytes of a request body", "N"),
        Flag("--enable-prefill-logprobs", "allow decoder_input_details: the logprobs of a prompt"),
    ],
    "batching": [
        Flag("--max-concurrent-requests", "requests in the server; more are answered with status 429", "N"),
        Flag("--max-queued-tokens", "prompt tokens that may wait; beyond, status 429", "N", default="derived"),
        Flag("--max-batch-prefill-tokens", "prompt tokens computed in a step", "N", default="the device's"),
        Flag("--max-batch-total-tokens", "tokens in the KV cache", "N", default="from memory"),
        Flag("--max-batch-size", "requests computed at a time", "N", default="the device's"),
        Flag("--max-step-ms", "longest step with prompts beside running requests: their chunks follow it; 0: any", "N"),
        Flag("--waiting-served-ratio", "waiting to running, from which on prompts interrupt decoding", "X"),
        Flag("--max-waiting-tokens", "decode steps after which waiting prompts interrupt anyway", "N"),
        Flag("--bucketing", "pad every step to a shape that was warmed up", "true|false", default="on Gaudi"),
        Flag("--bucket-strategy", "its shapes: linear or exponential", "NAME", default="see BATCH_BUCKET_SIZE below"),
        Flag("--no-prefix-caching", "compute every prompt in full", field="prefix_caching", sets=False),
    ],
    "server": [
        Flag("--hostname", "IP address to listen on; what is no address counts as 0.0.0.0", "ADDRESS"),
        Flag("--port", "port to listen on", "PORT", short="-p"),
        Flag("--api-key", "key that clients must send as a bearer token", "KEY", default="no key is asked for"),
        Flag("--admin-api-key", "key for what only an administrator may do", "KEY", default="nobody may"),
        Flag("--cors-allow-origin", "origin that browsers may call from (repeatable)", "ORIGIN", default="any"),
        Flag("--cache-salt-by-key", "share cached prefixes only between requests with the same API key"),
        Flag("--hide-cached-tokens", "do not tell in `usage` how many prompt tokens were cached"),
        Flag("--client-header", "header in which a proxy names the client", "NAME", default="the connection's address"),
        Flag("--max-connections", "connections open at a time; beyond, status 503", "N", default="derived"),
        Flag("--validation-workers", "threads that check and tokenise requests", "N"),
        Flag("--graceful-termination-timeout", "seconds for requests to end after SIGTERM", "SECONDS", short="-g"),
        Flag("--request-timeout-s", "seconds after which a request ends with status 504", "SECONDS", default="none"),
        Flag("--step-timeout-s", "seconds after which a step counts as hung", "SECONDS", default="the device's"),
    ],
    "hub": [
        Flag("--huggingface-hub-cache", "folder of downloaded models", "DIR", default="the hub library's"),
        Flag("--cache-dir", "folder of converted models and compiled kernels", "DIR", default="~/.cache/tgi"),
    ],
    "device": [
        Flag("--device", "auto (a GPU or a Gaudi card if there is one), cpu, cuda or hpu", "NAME"),
        Flag("--num-threads", "CPU threads", "N", default="all cores"),
        Flag("--cuda-memory-fraction", "share of the GPU's memory to use", "X"),
        Flag("--cuda-graphs", "batch sizes to capture, separated by commas; 0: none", "LIST", default="the device's"),
        Flag("--disable-custom-kernels", "torch's own ops only", field="custom_kernels", sets=False),
        Flag("--sharded", "split the model over devices: one is used", "true|false"),
        Flag("--num-shard", "number of devices to split it over: 1; on Gaudi more is accepted", "N", default="1"),
    ],
    "observability": [
        Flag("--json-output", "logs as JSON lines"),
        Flag("--env", "log the versions of what runs", short="-e"),
        Flag("--otlp-endpoint", "OTLP gRPC collector of traces", "URL", default="no traces"),
        Flag("--otlp-service-name", "name of the service in traces", "NAME"),
    ],
    "accepted for compatibility (each is refused or has no effect, and says so at start)": [
        Flag("--speculate", "speculative tokens per step", "N"),
        Flag("--rope-scaling", "linear or dynamic", "KIND"),
        Flag("--rope-factor", "factor of --rope-scaling", "X"),
        Flag("--lora-adapters", "repo/id, repo/id@revision or name=/path, separated by commas", "LIST"),
        Flag("--trust-remote-code", "run code that comes with a model"),
        Flag("--shard-uds-path", "prefix of unix sockets", "PATH"),
        Flag("--master-addr", "address for ranks to meet at", "HOST"),
        Flag("--master-port", "port for ranks to meet at", "PORT"),
        Flag("--prometheus-port", "a second port for metrics", "PORT"),
        Flag("--usage-stats", "on, off or no-stack", "LEVEL"),
        Flag("--ngrok", "open a tunnel"),
        Flag("--ngrok-authtoken", "token of the tunnel", "TOKEN"),
        Flag("--ngrok-edge", "edge of the tunnel", "EDGE"),
    ],
}

_END = "A flag beats its environment variable. Rules, exit codes and every variable: docs/cli.md, docs/environment.md."


class Launch(msgspec.Struct, frozen=True):
    """A checked configuration, and what its owner should be told."""

    config: ServerConfig
    notes: list[str]
    variables: list[str] = []  # those of `variables` that are set, with their values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")

    def format_help(self) -> str:
        text, end = super().format_help(), f"\n{_END}\n"
        return f"{text}\n{_describe_variables(self._get_formatter())}{end}"


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(110, shutil.get_terminal_size((112, 24)).columns - 2))


def build_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of all flags, whose options are read by `read_arguments`. Mistakes raise `StartError`."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [OPTIONS]",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="show this help")
    general.add_argument("-V", "--version", action="version", version=f"{prog} {__version__}", help="show the version")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            names = [name for name in (flag.short, flag.name) if name]
            text = f"{flag.help} {_origins(flag)}".replace("%", "%%")
            if flag.value:
                # Repeated values are joined where the field is a list; elsewhere the last one counts.
                group.add_argument(*names, dest=flag.name, metavar=flag.value, action="append", help=text)
            else:
                group.add_argument(*names, dest=flag.name, action="store_true", help=text)
    return parser


def _describe_variables(formatter: argparse.HelpFormatter) -> str:
    """The part of the help that is about variables, below the flags."""
    for title, found in variables.SETTINGS.items():
        formatter.start_section(title)
        for variable in found:
            default = f" [default: {variable.default}]" if variable.default else ""
            action = argparse.Action([], "", help=f"{variable.help}{default}".replace("%", "%%"), metavar="")
            action.option_strings = [f"{variable.name}={variable.value}"]
            action.nargs = 0
            formatter.add_argument(action)
        formatter.end_section()
    formatter.start_section("variables: others")
    others = "; ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    formatter.add_text(f"other names of those above: {others}".replace("%", "%%"))
    formatter.add_text(f"of the hub: {', '.join(variables.OF_THE_HUB)}")
    for reader, names in variables.PASSED_ON.items():
        formatter.add_text(f"read by {reader}: {', '.join(names)}".replace("%", "%%"))
    formatter.add_text(
        f"known, without effect (a start that finds one says why): {', '.join(variables.WITHOUT_EFFECT)}"
    )
    formatter.end_section()
    return formatter.format_help()


def _origins(flag: Flag) -> str:
    """Default and environment variable, for the help."""
    default = getattr(ServerConfig(), flag.target)
    shown = flag.default or (str(default) if flag.value and default not in (None, "", []) else "")
    # A switch that turns a setting off has no variable of its own, except where that is negated too.
    variable = variable_of(flag.target) if flag.value or flag.sets or flag.target == "custom_kernels" else None
    if flag.name == "--no-prefix-caching":
        variable = "PREFIX_CACHING=0"
    parts = [f"default: {shown}" if shown else "", f"env: {variable}" if variable else ""]
    return f"[{'; '.join(part for part in parts if part)}]" if any(parts) else ""


def read_arguments(options: argparse.Namespace, environment: Mapping[str, str]) -> Launch:
    """The configuration that flags and environment ask for. Raises `StartError` in TGI's words."""
    by_flag = _read_flags(options)
    overridden = {variable_of(field) for field in by_flag}
    overridden |= {alias for alias, name in ALIASES.items() if name in overridden}
    kept = {name: text for name, text in environment.items() if name not in overridden}
    by_variable = read_environment(kept)
    config = ServerConfig(**{**by_variable, **by_flag})
    notes: list[str] = []
    config = _choose_shards(config, environment, notes)
    _check(config)
    given = {*by_flag, *by_variable}
    effects.check_given(config, given)
    if config.aip_http_port is not None:
        port = by_flag.get("port", config.aip_http_port)
        config = msgspec.structs.replace(config, port=port, aip_http_port=port)
    is_own_name = "hostname" not in by_flag and config.hostname == socket.gethostname()  # containers set HOSTNAME so
    config = msgspec.structs.replace(config, hostname=_choose_hostname(config.hostname, [] if is_own_name else notes))
    if environment.get("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN", "true") not in ("true", "false", ""):
        notes.append("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN has no effect: only the text true, as it is here, counts")
    known = {name for name in variables.NO_EFFECT if kept.get(name)}
    return Launch(config, notes + explain(config, given | known), variables.list_given(environment))


def _check(config: ServerConfig) -> None:
    try:
        config.check()
    except StartError as error:
        raise StartError(f"Invalid argument: {error}") from None


def _read_flags(options: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for flag in (flag for flags in FLAGS.values() for flag in flags):
        found: Sequence[str] | bool | None = getattr(options, flag.name, None)
        if found is True:
            fields[flag.target] = flag.sets
        elif found:
            text = ",".join(found) if isinstance(getattr(ServerConfig(), flag.target), list) else found[-1]
            shown = "***" if flag.target in SECRETS else repr(text)
            fields[flag.target] = parse_value(flag.target, text, f"{flag.name} {shown}")
    return fields


def explain(config: ServerConfig, given: Collection[str]) -> list[str]:
    """One line for each setting or variable in `given` that has no effect, and why."""
    return effects.explain(config, given, {flag.target: flag.name for flags in FLAGS.values() for flag in flags})


def _choose_hostname(hostname: str, notes: list[str]) -> str:
    if hostname == "localhost":
        return "127.0.0.1"
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        notes.append(f"Invalid hostname, defaulting to 0.0.0.0: {hostname!r} is not an IP address")
        return "0.0.0.0"
    return hostname


def _choose_shards(config: ServerConfig, environment: Mapping[str, str], notes: list[str]) -> ServerConfig:
    """One process serves the model. The published commands for Gaudi ask for more cards, and are served by one."""
    wants_more = config.num_shard is not None and config.num_shard > 1
    if (wants_more or (config.sharded and config.num_shard is None)) and effects.device_of(config) == "hpu":
        asked = "--sharded true" if config.num_shard is None else f"--num-shard {config.num_shard}"
        notes.append(f"{asked}: one card is used, because a model is not split over cards yet; it must fit into one")
        return msgspec.structs.replace(config, sharded=None, num_shard=1)
    if config.num_shard is not None:
        return config
    _check(config)
    if not config.sharded:
        return msgspec.structs.replace(config, num_shard=1)
    num_devices = count_devices(environment)
    if num_devices <= 1:
        raise StartError(f"not enough cuda devices: `sharded` is true but only found {num_devices} CUDA devices")
    return msgspec.structs.replace(config, num_shard=num_devices)


def count_devices(environment: Mapping[str, str]) -> int:
    """Devices that the variables of GPU containers let this process see; 0 without any of them."""
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        text = environment.get(variable)
        if text is None:
            continue
        if variable == "NVIDIA_VISIBLE_DEVICES" and text in ("all", "void"):
            return _count_gpus()
        return len([item for item in text.split(",") if item.strip()])
    return 0


def _count_gpus() -> int:
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.split())
