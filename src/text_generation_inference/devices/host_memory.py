"""Memory that this process may still take: what the machine has, and what its control groups allow.

Never torch. In a container the machine's figures say nothing about the limit at which the kernel kills.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 has no word for it, but numbers as large as this


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of the machine's and of each group's that this process is in."""
    return min(_machine_bytes(proc), *_group_bytes(proc, groups), _UNLIMITED)


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _machine_bytes(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _group_bytes(proc: Path, groups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            for folder in _folders(groups, path):
                limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
                yield from _left(limits, folder / "memory.current", folder, "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _folders(groups / "memory", path):
                limits = [_number(folder / "memory.limit_in_bytes")]
                yield from _left(limits, folder / "memory.usage_in_bytes", folder, "total_inactive_file")


def _folders(root: Path, path: str) -> Iterator[Path]:
    """A group's folder and those above it. Inside a container the path may be the host's, and its own group is at the
    root."""
    names = [name for name in path.split("/") if name]
    folder = root.joinpath(*names)
    if ".." in names or not folder.is_dir():
        folder = root
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder


def _left(limits: list[int | None], usage: Path, folder: Path, reclaimable: str) -> Iterator[int]:
    """Below the limit; pages of files that nobody has used lately count as free, as the kernel takes them back."""
    used = _number(usage)
    limit = min((value for value in limits if value is not None), default=_UNLIMITED)
    if limit >= _UNLIMITED or used is None:
        return
    yield max(0, limit - used + min(used, _statistic(folder / "memory.stat", reclaimable)))


def _statistic(path: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get(name, 0))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
