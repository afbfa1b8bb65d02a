"""Which devices this process may see, as far as can be told without torch, and how many ranks they make."""

import shutil
import subprocess
from collections.abc import Mapping

from text_generation_inference.config import ServerConfig, may_share_cards
from text_generation_inference.devices.driver import begin_context, read_driver
from text_generation_inference.errors import StartError


def find_device(asked: str) -> str:
    """Where the model will run."""
    if asked != "auto":
        return asked
    if read_driver().gpus:
        return "cuda"
    return "hpu" if shutil.which("hl-smi") else "cpu"


def begin_early(asked: str, num_ranks: int) -> None:
    """Before torch is imported, in a process that will compute: what a device can get ready meanwhile."""
    if asked in ("auto", "cuda") and num_ranks == 1:  # else the card is not always the first
        begin_context()


def count_ranks(config: ServerConfig, environment: Mapping[str, str]) -> int:
    """Over how many devices the model is split, by TGI's rules. Raises `StartError` in its words."""
    if config.num_shard is not None:
        return config.num_shard
    if config.sharded is False:
        return config.nnodes
    each = config.num_replicas  # engines, which share the devices out
    device = find_device(config.device)
    num_devices = count_devices(environment, device)
    if config.sharded:
        if num_devices is None:
            num_devices = len(read_driver().gpus) if device == "cuda" else _count_gaudi() if device == "hpu" else 0
        if num_devices // each * config.nnodes <= 1:
            hint = "; on a CPU say with `num_shard` how many ranks there are" if device == "cpu" else ""
            raise StartError(
                f"not enough cuda devices: `sharded` is true but only found {num_devices} CUDA devices{hint}"
            )
        return num_devices // each * config.nnodes
    # Devices that nobody asked to use do not matter to one that is none of them; cards of Gaudi were never counted.
    return max(1, (num_devices or 1) // each) * config.nnodes if device == "cuda" else config.nnodes


def check_cards(config: ServerConfig, environment: Mapping[str, str]) -> None:
    """Raise `StartError` if this machine has fewer cards than ranks, those of all replicas together."""
    num_local = (config.num_shard or 1) // config.nnodes
    num_needed = num_local * config.num_replicas
    if num_needed <= 1 or may_share_cards(environment):
        return
    device = find_device(config.device)
    if device == "cpu":
        return
    num_cards = len(read_driver().gpus) if device == "cuda" else _count_gaudi()
    if not num_cards:  # none that can be seen: starting will say why
        return
    shown = "GPU" if device == "cuda" else "Gaudi card"
    if num_cards < num_local:
        where = "this machine" if config.nnodes > 1 else "the model"
        raise StartError(
            f"Invalid argument: `num_shard` is {config.num_shard}, which is {num_local} ranks for {where}, but"
            f" {num_cards} {shown}{'s' if num_cards > 1 else ''} can be seen: each rank needs one of its own"
        )
    if num_cards < num_needed:
        raise StartError(
            f"Invalid argument: `num_replicas` is {config.num_replicas}, each with {num_local} rank"
            f"{'s' if num_local > 1 else ''}, which takes {num_needed} {shown}s, but {num_cards} can be seen: at most"
            f" {num_cards // num_local} fit"
        )


def count_devices(environment: Mapping[str, str], device: str = "cuda") -> int | None:
    """Devices that variables let this process see, counted as TGI did: items between commas, whatever they are; None
    without any of those variables. `all` is what is there."""
    if device == "hpu":
        for variable in ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"):
            text = environment.get(variable)
            if text:
                return _count_gaudi() if text == "all" else len(text.split(","))
        return None
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        text = environment.get(variable)
        if text is None:
            continue
        if variable == "NVIDIA_VISIBLE_DEVICES" and text in ("all", "void"):
            return _count_lines("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
        return len(text.split(","))
    return None


def card_bytes(asked: str) -> int | None:
    """Memory of the smallest card that a model with this setting of `device` runs on; None: there is none, or it cannot
    be told without opening it."""
    device = find_device(asked)
    if device == "cuda":
        return min((gpu.memory_bytes for gpu in read_driver().gpus), default=None)
    if device != "hpu":
        return None
    words = _ask("hl-smi", "-Q", "memory.total", "-f", "csv,noheader,nounits").split()
    return min((int(word) << 20 for word in words if word.isdigit()), default=None)


def _count_gaudi() -> int:
    return _count_lines("hl-smi", "-Q", "uuid", "-f", "csv,noheader")


def _count_lines(*query: str) -> int:
    return len(_ask(*query).split())


def _ask(*query: str) -> str:
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
