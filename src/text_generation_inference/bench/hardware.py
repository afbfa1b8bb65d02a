"""What a benchmark ran on."""

import os
import platform
from typing import Any

import torch

from text_generation_inference.devices.device import Device


def describe_hardware(device: Device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": device.name, "cpus": os.cpu_count(), "machine": platform.machine()}
    if device.torch_device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device.torch_device)
        found["gpu"], found["gpu_gb"] = properties.name, round(properties.total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
    else:
        found["threads"] = torch.get_num_threads()
    return found
