"""Which cards each of several engines on one machine gets. Without torch, so that the launcher can say.

Engines that compute on the CPU share its threads and memory by themselves.
"""

import subprocess
from collections.abc import Mapping

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.driver import read_driver
from text_generation_inference.devices.visible import find_device

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "hpu": "HABANA_VISIBLE_MODULES"}  # what selects cards for a process
_MODULES = ("hl-smi", "-Q", "module_id", "-f", "csv,noheader")


def share_cards(config: ServerConfig, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """For each of `num_replicas` engines the variables that select its cards: as many as it has ranks, one after the
    other. None where there is nothing to select: one engine, the CPU, or fewer cards than were asked for."""
    count, each = config.num_replicas, config.num_shard or 1
    device = find_device(config.device) if count > 1 else ""
    cards = _list_cards(device, environment) if device in _VISIBLE else []
    if len(cards) < count * each:
        return [{} for _ in range(count)]
    name = _VISIBLE[device]
    return [{name: ",".join(cards[place * each : (place + 1) * each])} for place in range(count)]


def _list_cards(device: str, environment: Mapping[str, str]) -> list[str]:
    """The cards that this process may see, as the variable that selects them names them."""
    named = [item.strip() for item in environment.get(_VISIBLE[device], "").split(",") if item.strip()]
    if device == "hpu":
        return named or _ask_modules()
    count = len(read_driver().gpus)
    return named[:count] if named else [str(place) for place in range(count)]


def _ask_modules() -> list[str]:
    try:
        done = subprocess.run(_MODULES, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted((line for line in done.stdout.split() if line.isdigit()), key=int)
