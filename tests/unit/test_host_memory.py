"""Free memory as the kernel tells it, from files of a machine that is not this one."""

import mmap
from pathlib import Path

import pytest

from text_generation_inference.devices.host_memory import available_bytes, resident_bytes

GIB = 1 << 30


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    groups.mkdir()
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 16 * GIB),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 16 * GIB),
        ("0::/\n", {"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB}\n"}, GIB),
        (  # files that were read once are not in the way
            "0::/\n",
            {
                "memory.max": f"{2 * GIB}",
                "memory.current": f"{2 * GIB}",
                "memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            GIB,
        ),
        (  # the tightest of all groups above counts
            "0::/a/b\n",
            {
                "a/b/memory.max": f"{8 * GIB}",
                "a/b/memory.current": "0",
                "a/memory.max": f"{4 * GIB}",
                "a/memory.current": f"{3 * GIB}",
            },
            GIB,
        ),
        ("0::/a\n", {"a/memory.max": "max", "a/memory.high": f"{GIB}", "a/memory.current": "0"}, GIB),
        ("0::/../host/pod\n", {"memory.max": f"{GIB}", "memory.current": "0"}, GIB),
        (
            "4:cpu,memory:/docker/abc\n0::/\n",  # as the host names it, seen from inside
            {"memory/memory.limit_in_bytes": f"{3 * GIB}", "memory/memory.usage_in_bytes": f"{GIB}"},
            2 * GIB,
        ),
        (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "9223372036854771712", "memory/a/memory.usage_in_bytes": "7"},
            16 * GIB,
        ),
        ("0::/\n", {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}, 0),
    ],
)
def test_free_memory(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert available_bytes(*machine(tmp_path, cgroup, files)) == expected


def test_of_this_machine() -> None:
    assert available_bytes() > 0


def test_what_this_process_holds() -> None:
    size = 64 << 20
    before = resident_bytes()
    with mmap.mmap(-1, size) as held:  # new pages: what `malloc` gives may have been here before
        held[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)
        assert 50_000_000 < resident_bytes() - before < 200_000_000
