"""Ranks that the launcher of a cluster has given out: the variables of torchrun, and of those that speak its words.

torchrun starts as many processes on a machine as it has ranks. The first of them is the launcher of that machine, which
starts a process for each rank itself; the others have nothing to do.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from text_generation_inference.config.environment import parse_value
from text_generation_inference.errors import StartError


class ClusterRanks(msgspec.Struct, frozen=True):
    """What a cluster's launcher says of this process."""

    settings: dict[str, Any] = {}  # fields of `ServerConfig`
    local_rank: int = 0  # above 0: another process of this machine is the launcher


def read_cluster(environment: Mapping[str, str]) -> ClusterRanks:
    """What RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK say, unless NUM_SHARD, NNODES, NODE_RANK do.

    Without LOCAL_RANK a rank is a machine, as Kubernetes gives them out.
    """
    world = _read(environment, "WORLD_SIZE")
    rank = _read(environment, "RANK")
    if world is None or rank is None:
        return ClusterRanks()
    local_rank = _read(environment, "LOCAL_RANK")
    local_world = _read(environment, "LOCAL_WORLD_SIZE")
    if local_world is None:
        local_world = 1 if local_rank is None else world
    local_rank = local_rank or 0
    node_rank = _read(environment, "GROUP_RANK")
    node_rank = rank // max(local_world, 1) if node_rank is None else node_rank
    if world < 1 or local_world < 1 or world % local_world or rank != node_rank * local_world + local_rank:
        raise StartError(
            f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world} and"
            f" GROUP_RANK={node_rank} do not fit together: each machine has LOCAL_WORLD_SIZE ranks, and RANK is"
            " GROUP_RANK x LOCAL_WORLD_SIZE + LOCAL_RANK. Set them as torchrun does, or none of them"
        )
    settings = {"num_shard": world, "nnodes": world // local_world, "node_rank": node_rank}
    settings = {name: value for name, value in settings.items() if not environment.get(name.upper())}
    port = _read(environment, "MASTER_PORT")
    if port is not None and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        settings["master_port"] = port + 1  # torchrun itself listens on that one
    return ClusterRanks(settings, local_rank)


def _read(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    return parse_value("num_shard", text, f"environment variable {name}={text!r}") if text else None
