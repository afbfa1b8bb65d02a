"""Which card this is."""

from enum import Enum

from habana_frameworks.torch._emulation import GENERATION


class synDeviceType(Enum):
    synDeviceGaudi = 1
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType:
    return synDeviceType[f"synDevice{GENERATION}"]
