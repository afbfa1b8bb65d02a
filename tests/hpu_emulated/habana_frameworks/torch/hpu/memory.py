"""Memory figures, in bytes. `Limit` is the size of the card that is played."""

from typing import Any

from habana_frameworks.torch._card import card
from habana_frameworks.torch._emulation import books


def memory_stats(device: Any = None) -> dict[str, int]:
    in_use = books.in_use()
    stats = dict.fromkeys(
        (
            "NumAllocs",
            "NumFrees",
            "ActiveAllocs",
            "MaxAllocSize",
            "TotalSystemAllocs",
            "TotalSystemFrees",
            "TotalActiveAllocs",
        ),
        0,
    )
    return {"Limit": books.limit, "InUse": in_use, "MaxInUse": books.peak, **stats}


def mem_get_info(device: Any = None) -> tuple[int, int]:
    stats = memory_stats(device)
    return stats["Limit"] - stats["InUse"], stats["Limit"]


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["InUse"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["Limit"]


def reset_peak_memory_stats(device: Any = None) -> None:
    card.set("peak", card.get("in_use"))


def memory_summary(device: Any = None) -> str:
    return "\n".join(f"{name}: {value}" for name, value in memory_stats(device).items())
