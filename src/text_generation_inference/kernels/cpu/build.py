"""Compiles the C kernels once per machine and loads them.

Owns the compiler call and the folder of built libraries. Every way in which this can fail is a reason in
words, never an exception: the caller then keeps the ops of `kernels.reference`.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
SOURCE_DIR = Path(__file__).parent
SOURCE_NAMES = (
    "native.c",
    "amx.h",
    "attention.h",
    "blocks.h",
    "experts.h",
    "fixed.h",
    "int8.h",
    "latent.h",
    "linear.h",
    "panels.h",
    "rows.h",
    "simd.h",
    "fused_decode.h",
    "team.h",
)
# Without contraction every fused multiply-add is one that the source asks for, so results do not vary by compiler.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=default", "-shared", "-fPIC", "-pthread")
NEEDED_CPU_FLAGS = {"avx2", "fma", "f16c"}
COMPILE_SECONDS = 300  # about 10 alone; far more on a busy machine


def load_library(cache_dir: Path, compilers: Sequence[str] = COMPILERS, march: str = "native") -> ctypes.CDLL | str:
    """The kernels as a loaded library, or why there are none."""
    flags = cpu_flags()
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the native kernels are for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    if missing := NEEDED_CPU_FLAGS - set(flags.split()):
        return f"this CPU lacks {', '.join(sorted(missing))}"
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        return f"no C compiler found (looked for {', '.join(compilers) or 'none'})"
    try:
        return _load_or_compile(compiler, cache_dir, flags, march)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the native kernels could not be built or loaded: {error}"


def _load_or_compile(compiler: str, cache_dir: Path, flags: str, march: str) -> ctypes.CDLL | str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_SECONDS, check=True).stdout
    key = hashlib.sha256()
    for part in (*((SOURCE_DIR / name).read_bytes() for name in SOURCE_NAMES), version, flags.encode(),
                 march.encode(), " ".join(FLAGS).encode()):  # fmt: skip
        key.update(len(part).to_bytes(8, "little") + part)
    folder = cache_dir / "cpu-kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    # What lies here is executed: nobody else may be able to put it there.
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} is not a folder that only this user can write to"
    path = folder / f"{key.hexdigest()}.so"
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)
    return _compile(compiler, path, march) or ctypes.CDLL(str(path))


def _compile(compiler: str, path: Path, march: str) -> str | None:
    """Write the library at `path` in one step; the reason if the compiler refuses."""
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        output = Path(work) / path.name
        command = [compiler, *FLAGS, f"-march={march}", "-o", str(output), str(SOURCE_DIR / "native.c"), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        if done.returncode:
            return f"{compiler} failed on the native kernels: {done.stderr.strip()[-500:]}"
        output.rename(path)
    return None


def cpu_flags() -> str:
    """What this CPU can do, as the kernel lists it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else ""
