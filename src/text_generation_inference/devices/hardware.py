"""What this machine computes on: names for a report, memory, and whether figures taken there mean anything."""

import os
import platform
import resource
from typing import Any

import torch

from text_generation_inference.devices.device import Device
from text_generation_inference.errors import StartError


def describe_hardware(device: Device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": device.name, "cpus": os.cpu_count(), "machine": platform.machine()}
    if device.torch_device.type == "cuda":
        properties = _read_properties(device.torch_device)
        found["gpu"], found["gpu_gb"] = properties.name, round(properties.total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
    else:
        found["threads"] = torch.get_num_threads()
    return found


def _read_properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)  # pyright: ignore


def runs_on_gpu(device: str) -> bool:
    """Whether a model with this setting of `device` runs on a GPU."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def gpu_name() -> str | None:
    """Of the GPU that torch uses, if it can."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def memory_bytes(device: str) -> int:
    """Of the device that a model with this setting runs on."""
    if runs_on_gpu(device):
        return _read_properties(torch.device("cuda", 0)).total_memory if torch.cuda.is_available() else 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_gb(device: Device) -> float | None:
    """Of the device; on a CPU, of the process."""
    match device.torch_device.type:
        case "cpu":
            return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)
        case "cuda":
            return round(torch.cuda.max_memory_reserved(device.torch_device) / 1e9, 3)
        case _:
            return None


def refuse_emulation(device: Device) -> None:
    """A stand-in's speed says nothing of what it stands for."""
    if "emulated" in device.name:
        raise StartError(f"the model runs on {device.name}: no figures are taken, because they would not be a card's")
