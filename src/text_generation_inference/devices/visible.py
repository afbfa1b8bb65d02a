"""Which devices this process may see, as far as can be told without torch."""

import shutil
import subprocess
from collections.abc import Mapping

from text_generation_inference.devices.driver import read_driver
from text_generation_inference.errors import StartError


def find_device(asked: str) -> str:
    """Where the model will run."""
    if asked != "auto":
        return asked
    if read_driver().gpus:
        return "cuda"
    return "hpu" if shutil.which("hl-smi") else "cpu"


def count_to_split(environment: Mapping[str, str]) -> int:
    """How many devices `--sharded true` means. Raises `StartError`, in TGI's words, where there are not several."""
    num_devices = count_devices(environment)
    if num_devices <= 1:
        raise StartError(f"not enough cuda devices: `sharded` is true but only found {num_devices} CUDA devices")
    return num_devices


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
