"""The command line of `text-generation-launcher`: a parser and its help made from the settings, and what it reads.

A flag beats its variable, which beats the default. `read_arguments` is pure but for looking at devices where a setting
depends on them.
"""

import argparse
import ipaddress
import shutil
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import msgspec

from text_generation_inference.config import (
    ALIASES,
    SETTINGS,
    ServerConfig,
    effects,
    flag_of,
    parse_value,
    read_environment,
    variable_of,
    variables,
)
from text_generation_inference.config.cluster import read_cluster
from text_generation_inference.devices import visible
from text_generation_inference.errors import StartError
from text_generation_inference.version import __version__

_END = "A flag beats its environment variable. Rules, exit codes and every variable: docs/cli.md, docs/environment.md."


class Launch(msgspec.Struct, frozen=True):
    """A checked configuration, and what its owner should be told."""

    config: ServerConfig
    notes: list[str]
    variables: list[str] = []  # those of `variables` that are set, with their values
    local_rank: int = 0  # above 0: another process of this machine serves, see `config.cluster`


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
    for section, names in sections(with_flags=True).items():
        group = parser.add_argument_group(section)
        for name in names:
            setting, flag = SETTINGS[name], flag_of(name) or ""
            text = f"{setting.help} {_origins(name)}".replace("%", "%%")
            # Repeated values are joined where the field is a list; elsewhere the last one counts.
            action = "append" if setting.value else "store_true"
            more: dict[str, Any] = {"metavar": setting.value} if setting.value else {}
            group.add_argument(*filter(None, (setting.short, flag)), dest=flag, action=action, help=text, **more)
    return parser


def sections(with_flags: bool) -> dict[str, list[str]]:
    """The settings that the help shows, by section: those with a flag, or those with a variable alone."""
    found: dict[str, list[str]] = {}
    for name, setting in SETTINGS.items():
        if setting.help and (setting.flag is not None) == with_flags:
            found.setdefault(setting.section, []).append(name)
    return found


def _describe_variables(formatter: argparse.HelpFormatter) -> str:
    """The part of the help that is about variables, below the flags."""
    for section, names in sections(with_flags=False).items():
        formatter.start_section(section)
        listed = {SETTINGS[name].listed or variable_of(name): name for name in reversed(names)}
        for variable, name in reversed(listed.items()):
            shown = default_of(name)
            default = f" [default: {shown}]" if shown else ""
            action = argparse.Action([], "", help=f"{SETTINGS[name].help}{default}".replace("%", "%%"), metavar="")
            action.option_strings = [f"{variable}={SETTINGS[name].value}"]
            action.nargs = 0
            formatter.add_argument(action)
        formatter.end_section()
    formatter.start_section("variables: others")
    others = "; ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    formatter.add_text(f"other names of those above: {others}".replace("%", "%%"))
    formatter.add_text(f"of the hub: {', '.join(variables.OF_THE_HUB)}")
    formatter.add_text(f"of torchrun, for --num-shard, --nnodes, --node-rank: {', '.join(variables.OF_TORCHRUN)}")
    for reader, names in variables.PASSED_ON.items():
        formatter.add_text(f"read by {reader}: {', '.join(names)}".replace("%", "%%"))
    formatter.add_text(
        f"known, without effect (a start that finds one says why): {', '.join(variables.WITHOUT_EFFECT)}"
    )
    formatter.end_section()
    return formatter.format_help()


def default_of(name: str) -> str:
    """The default of a setting, for people; empty: there is none."""
    value = getattr(ServerConfig(), name)
    plain = "" if value in (None, "", []) else str(value).lower() if isinstance(value, bool) else str(value)
    return SETTINGS[name].default or plain


def _origins(name: str) -> str:
    """Default and environment variable, for the help."""
    setting, variable = SETTINGS[name], variable_of(name)
    if variable and setting.turns_off and not setting.negated:
        variable += "=0"
    default = default_of(name) if setting.value else ""
    parts = [f"default: {default}" if default else "", f"env: {variable}" if variable else ""]
    return f"[{'; '.join(part for part in parts if part)}]" if any(parts) else ""


def read_arguments(options: argparse.Namespace, environment: Mapping[str, str], needs_cards: bool = True) -> Launch:
    """The configuration that flags and environment ask for. Raises `StartError` in TGI's words, and if ranks have no
    cards here, unless it is only asked about them."""
    by_flag = _read_flags(options)
    overridden = {variable_of(field) for field in by_flag}
    overridden |= {alias for alias, name in ALIASES.items() if name in overridden}
    kept = {name: text for name, text in environment.items() if name not in overridden}
    by_variable = read_environment(kept)
    cluster = read_cluster(kept)
    config = ServerConfig(**{**by_variable, **cluster.settings, **by_flag})
    notes: list[str] = []
    config = _choose_shards(config, environment)
    if needs_cards:
        visible.check_cards(config, environment)
    given = {*by_flag, *by_variable}
    find_device = partial(visible.find_device, config.device)
    effects.check_given(config, given, find_device)
    if config.aip_http_port is not None:
        port = by_flag.get("port", config.aip_http_port)
        config = msgspec.structs.replace(config, port=port, aip_http_port=port)
    is_own_name = "hostname" not in by_flag and config.hostname == socket.gethostname()  # containers set HOSTNAME so
    config = msgspec.structs.replace(config, hostname=_choose_hostname(config.hostname, [] if is_own_name else notes))
    if environment.get("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN", "true") not in ("true", "false", ""):
        notes.append("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN has no effect: only the text true, as it is here, counts")
    known = {name for name in variables.NO_EFFECT if kept.get(name)}
    notes += effects.explain(config, given | known, find_device)
    return Launch(config, notes, variables.list_given(environment), cluster.local_rank)


def _check(config: ServerConfig) -> None:
    try:
        config.check()
    except StartError as error:
        raise StartError(f"Invalid argument: {error}") from None


def _read_flags(options: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        flag = flag_of(name)
        found: Sequence[str] | bool | None = getattr(options, flag, None) if flag else None
        if found is True:
            fields[name] = not setting.turns_off
        elif found:
            text = ",".join(found) if isinstance(getattr(ServerConfig(), name), list) else found[-1]
            shown = "***" if setting.secret else repr(text)
            fields[name] = parse_value(name, text, f"{flag} {shown}")
    return fields


def _choose_hostname(hostname: str, notes: list[str]) -> str:
    if hostname == "localhost":
        return "127.0.0.1"
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        notes.append(f"Invalid hostname, defaulting to 0.0.0.0: {hostname!r} is not an IP address")
        return "0.0.0.0"
    return hostname


def _choose_shards(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """With as many ranks as asked for, or as there are devices."""
    _check(config)
    config = msgspec.structs.replace(config, num_shard=visible.count_ranks(config, environment))
    _check(config)
    return config
