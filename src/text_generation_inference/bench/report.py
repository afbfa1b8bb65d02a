"""Results for people and for programs: tables, and JSON files; and where a result came from.

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

import msgspec

from text_generation_inference.bench.results import Published, RowResult, StepProfile
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


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe_versions() -> dict[str, str]:
    versions = {"tgi": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def find_commit() -> str | None:
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


def rows_table(rows: list[RowResult]) -> str:
    """Markdown, aligned for a terminal."""
    heads = ["in/out x requests", "output tok/s", "total tok/s", "step ms", "host ms", "TTFT ms", "TTFT max", "steps"]
    cells = [
        [
            f"{row.inputs}/{row.outputs} x{row.requests}",
            f"{row.output_tokens_per_s:,.1f}",
            f"{row.total_tokens_per_s:,.1f}",
            _number(row.step_ms, 3),
            _number(row.host_ms, 3),
            _number(row.first_token_ms, 1),
            _number(row.first_token_max_ms, 1),
            str(row.num_steps),
        ]
        for row in rows
    ]
    if any(row.peak_memory_gb is not None for row in rows):
        heads.append("peak GB")
        for row, line in zip(rows, cells, strict=True):
            line.append(_number(row.peak_memory_gb, 2))
    if any(row.floor_step_ms is not None for row in rows):
        heads += ["floor tok/s", "floor step ms", "of floor"]
        for row, line in zip(rows, cells, strict=True):
            share = "-" if row.of_floor is None else f"{row.of_floor:.1%}"
            line += [_number(row.floor_tokens_per_s, 1), _number(row.floor_step_ms, 3), share]
    published = [row.published for row in rows if row.published is not None]
    if published:
        heads.append(name_published(published))
        for row, line in zip(rows, cells, strict=True):
            line.append("-" if row.published is None else published_cell(row.published))
    return markdown(heads, cells)


def published_cell(published: Published) -> str:
    """The figure and how many cards gave it."""
    return f"{published.output_tokens_per_s:,.0f} ({published.cards} card{'s' if published.cards > 1 else ''})"


def name_published(published: list[Published]) -> str:
    """Whose figures they are."""
    return "published: " + "; ".join(dict.fromkeys(f"{one.model} on {one.hardware}" for one in published))


def profile_table(profile: StepProfile, most: int = 18) -> str:
    whole = max(profile.wall_ms, 1e-9)
    lines = [
        f"One decode step of {profile.rows} rows at {profile.context} tokens: {profile.wall_ms:.3f} ms from result to"
        f" result; traced {profile.traced_ms:.3f} ms: {profile.kernel_ms:.3f} ms in kernels,"
        f" {profile.gap_ms:.3f} ms between them",
        "",
    ]
    kinds = [[kind, f"{ms:.3f}", f"{ms / whole:.1%}"] for kind, ms in profile.by_kind.items()]
    kinds += [["gaps between kernels", f"{profile.gap_ms:.3f}", f"{profile.gap_ms / whole:.1%}"]]
    lines += [markdown(["part", "ms", "of the step"], kinds), ""]
    cells = [
        [f"{kernel.ms:.4f}", f"{kernel.ms / whole:.1%}", f"{kernel.calls:g}", kernel.kind, kernel.name[:90]]
        for kernel in profile.kernels[:most]
    ]
    return "\n".join([*lines, markdown(["ms", "of the step", "calls", "part", "kernel"], cells)])


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """The first column to the left, the others to the right, unless their heads say names."""
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]
    left = [column == 0 or head in ("kernel", "part", "model") for column, head in enumerate(heads)]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(cells, widths, left, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (w - 1) if is_left else "-" * (w - 1) + ":" for w, is_left in zip(widths, left, strict=True)]
    return "\n".join([line(heads), line(rule), *(line(row) for row in rows)])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
