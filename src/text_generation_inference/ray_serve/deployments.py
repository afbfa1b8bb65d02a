"""The application that Ray Serve runs: both deployments, with Ray's defaults set right for streams of tokens.

Ray's defaults let five requests at a time into a replica, cut streams 20 s after a replica is told to go, and start a
model that cannot start twenty times. Names of deployments are part of what config files may say.
"""

from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]

from text_generation_inference.config import SETTINGS, flag_of
from text_generation_inference.launch.arguments import build_parser
from text_generation_inference.ray_serve.ingress import IngressApp
from text_generation_inference.ray_serve.options import CLIENT_HEADER, RayOptions, read_args
from text_generation_inference.ray_serve.replica import ReplicaServer

INGRESS, REPLICA = "Ingress", "Replica"
# Not to be met: the api process says when it is full, in the API's words.
_MAX_ONGOING = 1_000_000
_STATS_EVERY_S = 1.0
_LOOK_BACK_S = 10.0
_STOP_S = 15.0  # for a launcher whose requests are drained
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # of Ray's own lines: those of servers are theirs
_STARTS = 2  # of a replica's launcher: what fails twice fails again


class Ingress:
    """Ray asks for the application once the ingress is there."""

    def __init__(self, replicas: Any, deployment: str, salt_by_key: bool) -> None:
        self._app = IngressApp(replicas, deployment, salt_by_key)

    def __serve_build_asgi_app__(self) -> IngressApp:
        return self._app

    async def drain(self) -> int:  # called by `tgi ray` when it is told to stop
        return self._app.drain()

    async def cut(self) -> None:  # likewise, when time is up
        self._app.cut()


def app(args: dict[str, Any]) -> Any:
    """`import_path: text_generation_inference.ray_serve:app` of Ray's config files; `args`: docs/scaling.md."""
    return build(*read_args(args))


def build(options: RayOptions, arguments: list[str]) -> Any:
    """The application, bound. `arguments`: flags of the launcher."""
    given = build_parser("tgi ray", "").parse_args(arguments)
    replicas = serve.deployment(ReplicaServer).options(**replica_settings(options, _gpus(options, given)))
    if not _value(given, "client_header"):
        arguments = [*arguments, flag_of("client_header") or "", CLIENT_HEADER]
    salt_by_key = bool(getattr(given, flag_of("cache_salt_by_key") or "", False))
    ingress = serve.deployment(serve.ingress(None)(Ingress)).options(**ingress_settings(options))
    return ingress.bind(replicas.bind(arguments, _STOP_S), REPLICA, salt_by_key)


def replica_settings(options: RayOptions, gpus: float) -> dict[str, Any]:
    resources = {"CPU": options.replica_cpus, **({"GPU": gpus} if gpus else {}), **options.replica_resources}
    actor: dict[str, Any] = {"num_cpus": options.replica_cpus, "resources": options.replica_resources}
    if gpus:
        actor["num_gpus"] = gpus
    settings: dict[str, Any] = {
        "name": REPLICA,
        "ray_actor_options": actor,
        # One bundle: the launcher's own processes are the ranks, so the actor that starts them must be given all cards.
        "placement_group_bundles": [resources],
        "placement_group_strategy": "STRICT_PACK",
        "max_ongoing_requests": _MAX_ONGOING,
        "graceful_shutdown_timeout_s": options.drain_timeout_s + _STOP_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "max_constructor_retry_count": _STARTS,
        "logging_config": QUIET,
        "request_router_config": {
            "request_router_class": "text_generation_inference.ray_serve.request_router:RayPrefixRouter",
            "request_routing_stats_period_s": _STATS_EVERY_S,
        },
    }
    if options.scales:
        settings["autoscaling_config"] = {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "initial_replicas": options.initial_replicas,
            "target_ongoing_requests": _MAX_ONGOING,
            "look_back_period_s": _LOOK_BACK_S,
            "metrics_interval_s": _STATS_EVERY_S,
            "upscale_delay_s": options.upscale_delay_s,
            "downscale_delay_s": options.downscale_delay_s,
            "policy": {
                "policy_function": "text_generation_inference.ray_serve.autoscaling:TokenPolicy",
                "policy_kwargs": {
                    "target_queued_tokens": options.target_queued_tokens,
                    "target_usage": options.target_usage,
                },
            },
        }
    else:
        settings["num_replicas"] = options.max_replicas
    return settings


def ingress_settings(options: RayOptions) -> dict[str, Any]:
    return {
        "name": INGRESS,
        "num_replicas": options.ingress_replicas,
        "ray_actor_options": {"num_cpus": 0},  # it mostly waits, and must not keep a replica out
        "max_ongoing_requests": _MAX_ONGOING,
        "graceful_shutdown_timeout_s": options.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": QUIET,
    }


def _gpus(options: RayOptions, given: Any) -> float:
    """Cards of a replica. What a flag does not say is not known here: the replica's machine may have other devices."""
    if options.replica_gpus is not None:
        return options.replica_gpus
    device = _value(given, "device")
    if device == "cpu" or options.replica_resources:
        return 0
    num_shard = _value(given, "num_shard")
    return int(num_shard) if num_shard else 1


def _value(given: Any, name: str) -> str | None:
    """Of a flag; None: not given."""
    assert name in SETTINGS
    found = getattr(given, flag_of(name) or "", None)
    return found[-1] if found else None
