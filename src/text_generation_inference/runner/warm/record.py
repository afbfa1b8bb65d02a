"""What is kept of a warm-up: the next start of the same model with the same settings knows how long each shape takes,
and how much memory."""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from text_generation_inference.runner.shapes import Bucket
from text_generation_inference.version import __version__


class WarmedShape(msgspec.Struct, array_like=True):
    phase: str
    batch: int
    length: int
    context: int
    contiguous: bool
    pictures: int
    seconds: float
    num_bytes: int  # 0: not measured
    captured: bool

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.phase, self.batch, self.length, self.context, self.contiguous, self.pictures)


class WarmRecord(msgspec.Struct):
    """What is kept of a warm-up, as JSON."""

    version: str
    settings: dict[str, Any]
    seconds: float
    num_captured: int
    shapes: list[WarmedShape]


def record_path(cache_dir: Path, settings: dict[str, Any]) -> Path:
    """Where the record of a warm-up with these settings is; any other version has its own."""
    text = msgspec.json.encode([__version__, sorted(settings.items())])
    return cache_dir / "warmed" / f"{hashlib.sha256(text).hexdigest()[:24]}.json"


def read_record(path: Path) -> WarmRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=WarmRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_record(path: Path, record: WarmRecord, settings: dict[str, Any]) -> None:
    """A cache folder that cannot be written to costs nothing but the estimates of the next start."""
    record.settings = settings
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")  # ranks write the same record
        partial.write_bytes(text)
        partial.replace(path)
    except OSError:
        pass
