"""Reports as JSON files, and where a result came from.

Knows no engine and no torch.
"""

import os
import platform
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from text_generation_inference.errors import StartError
from text_generation_inference.version import __version__

_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "flashinfer-python")


def check_writable(path: str, flag: str = "--json") -> None:
    """Raise `StartError` before minutes of work, if the file that `flag` names could not be written afterwards."""
    folder = Path(path).expanduser().resolve().parent
    if Path(path).expanduser().is_dir():
        raise StartError(f"{flag} {path}: is a folder; give the name of a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StartError(f"{flag} {path}: cannot write to {folder}: {error.strerror}") from None


def write_report(report: msgspec.Struct, path: str) -> None:
    write_whole(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def write_whole(path: str, data: bytes) -> None:
    """Replaces the file at once, so that a reader finds all of it at any time."""
    target = Path(path).expanduser()
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(target)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def describe_origin(hardware: dict[str, Any]) -> dict[str, Any]:
    """Fields of every report: when and where it was measured, and with what."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started_at": started_at, "versions": _versions(), "hardware": hardware, "commit": _find_commit()}


def _versions() -> dict[str, str]:
    versions = {"tgi": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _find_commit() -> str | None:
    """Of the sources this runs from; None when they are not in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def seconds_since_process_start() -> float:
    """Interpreter and imports included: what somebody waits who starts the command."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        return uptime - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return time.process_time()
