"""What may be said of replicas on Ray, beside the launcher's own flags. Knows nothing of Ray.

`tgi ray` reads it from its command line, Ray's config files give it as `args`; both become a `RayOptions` and the
launcher's arguments, which every replica reads where it runs: device and memory are its machine's.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from text_generation_inference.config import SETTINGS, flag_of
from text_generation_inference.errors import StartError

CANNOT_START = "the server cannot start"  # how the words begin with which a replica fails
CLIENT_HEADER = "x-tgi-client"  # set by the ingress: whose request it is
# Ray's proxies listen, not the replicas; each replica gets an address of its own.
_NOT_OURS = ("port", "hostname")


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Field names with dashes are the flags of `tgi ray`, and as they are the keys of `args` in Ray's config files."""

    min_replicas: int = 1
    max_replicas: int = 1
    initial_replicas: int | None = None  # None: as many as there are at least
    ingress_replicas: int = 1  # processes that hand answers on
    replica_cpus: float = 1.0  # that Ray sets aside for each replica, beside its cards
    replica_gpus: float | None = None  # None: one for each shard, unless there are other resources
    replica_resources: dict[str, float] = {}  # cards of other kinds, or what else there is, by Ray's names
    target_queued_tokens: int = 4_096  # prompt tokens that wait: one more replica for as many
    target_usage: float = 0.7  # of a replica's cache or batch: how full replicas should be
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    drain_timeout_s: float = 600.0  # for streams to end on a replica that is taken away

    def check(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise StartError(
                "`min_replicas` must be 0 or more, `max_replicas` at least 1 and at least `min_replicas`. "
                f"Given: {self.min_replicas} and {self.max_replicas}"
            )
        if self.initial_replicas is not None and not self.min_replicas <= self.initial_replicas <= self.max_replicas:
            raise StartError("`initial_replicas` must lie between `min_replicas` and `max_replicas`")
        if self.ingress_replicas < 1:
            raise StartError("`ingress_replicas` must be at least 1")
        if self.target_queued_tokens < 1:
            raise StartError("`target_queued_tokens` must be at least 1")
        if not 0 < self.target_usage <= 1:
            raise StartError("`target_usage` must be above 0 and at most 1")
        for name in ("replica_cpus", "upscale_delay_s", "downscale_delay_s", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise StartError(f"`{name}` must not be negative")

    @property
    def scales(self) -> bool:
        return self.min_replicas != self.max_replicas


NAMES = tuple(field.name for field in msgspec.structs.fields(RayOptions))


def read_args(args: Mapping[str, Any]) -> tuple[RayOptions, list[str]]:
    """Options and launcher arguments from the `args` of a Ray config file. Raises `StartError`."""
    given = {name.replace("-", "_"): value for name, value in args.items()}
    own = {name: given.pop(name) for name in NAMES if name in given}
    try:
        options = msgspec.convert(own, RayOptions, strict=False)
    except msgspec.ValidationError as error:
        raise StartError(f"args: {error}") from None
    options.check()
    return options, launcher_arguments(given)


def launcher_arguments(fields: Mapping[str, Any]) -> list[str]:
    """Settings by their names as a command line: {"model_id": "m", "max_batch_size": 8} -> --model-id m ..."""
    arguments: list[str] = []
    for name, value in fields.items():
        setting = SETTINGS.get(name)
        flag = flag_of(name) if setting is not None else None
        if flag is None or setting is None:
            raise StartError(f"args: `{name}` is not a flag of the launcher")
        if name in _NOT_OURS:
            raise StartError(f"args: `{name}` is set for Ray's proxies (`http_options`), not here")
        if not setting.value:  # a flag without a value
            if not isinstance(value, bool):
                raise StartError(f"args: `{name}` must be true or false")
            if value != setting.turns_off:
                arguments.append(flag)
        else:
            values: list[Any] = value if isinstance(value, list) else [value]
            texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in values]
            arguments += [word for text in texts for word in (flag, text)]
    return arguments
