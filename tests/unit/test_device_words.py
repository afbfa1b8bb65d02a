"""Devices are known by name in `devices/`, `kernels/` and `config/` alone; elsewhere the code asks what a device can."""

import re
from pathlib import Path

import msgspec

from text_generation_inference.config import ServerConfig

SOURCE = Path(__file__).parents[2] / "src" / "text_generation_inference"
AT_HOME = ("devices/", "kernels/", "config/")
WORDS = re.compile(r"cuda|(?<!g)hpu|gaudi|habana|nvidia|triton", re.IGNORECASE)  # throughput is no device
# Settings are called what TGI calls them: their names are no knowledge of a device.
SETTINGS = [field.name for field in msgspec.structs.fields(ServerConfig) if WORDS.search(field.name)]
NAMES = re.compile("|".join(rf"\b{name}\b|--{name.replace('_', '-')}\b" for name in SETTINGS))

# Who else may, and why. What no longer needs its line here fails the test: the list only gets shorter.
ALLOWED = {
    "bench/floor.py": "what a GPU's libraries need: measured with graphs and events of a GPU",
    "bench/generation_flags.py": "flags of a program that is for Gaudi cards",
    "bench/presets.py": "figures are published for cards, and say which",
    "bench/report.py": "versions of packages",
    "bench/step_profile.py": "a step on a GPU, kernel by kernel",
    "quant/auto_round.py": "kernels that a file's packing is named after",
    "quant/inc/config.py": "a key of Intel's configuration files",
    "quant/inc/scales.py": "generations of cards, as calibration files name them",
}


def files_with_words() -> dict[str, list[str]]:
    """Lines that name a device, by file."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(AT_HOME):
            lines = [line.strip() for line in path.read_text().splitlines() if WORDS.search(NAMES.sub("", line))]
            if lines:
                found[name] = lines
    return found


def allowance_of(name: str) -> str | None:
    return next((entry for entry in ALLOWED if name == entry or (entry.endswith("/") and name.startswith(entry))), None)


def test_device_words_stay_at_home() -> None:
    found = files_with_words()
    strangers = {name: lines for name, lines in found.items() if allowance_of(name) is None}
    assert not strangers, "ask the device what it can (Limits) instead of what it is called"
    unused = set(ALLOWED) - {allowance_of(name) for name in found}
    assert not unused, "an entry of ALLOWED is no longer needed"


def test_words_are_found() -> None:
    assert files_with_words()["bench/floor.py"]
    assert SETTINGS and not WORDS.search(NAMES.sub("", "config.cuda_graphs or config.limit_hpu_graph"))
    assert WORDS.search(NAMES.sub("", "torch.cuda.is_available()"))
