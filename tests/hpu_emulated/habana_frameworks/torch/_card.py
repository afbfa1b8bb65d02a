"""Builds the card of `_card.cpp` for the torch that is installed, once, and loads it: torch then has the device `hpu`."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("_card.cpp")
_TEXT = 1 << 20


def _build() -> Path:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ImportError("the stand-in for Gaudi needs a C++ compiler (g++ or clang++)")
    home = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{home / 'include'}"]
    flags += [f"-I{home / 'include/torch/csrc/api/include'}", f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}"]
    key = hashlib.sha256(repr((_SOURCE.read_bytes(), torch.__version__, flags)).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"hpu-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ImportError(f"{folder} is not a folder that only this user can write to, and what lies there is executed")
    built = folder / f"{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, the others wait
        if not built.exists():
            part = built.with_suffix(f".{os.getpid()}")
            command = [compiler, *flags, str(_SOURCE), "-o", str(part), "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ImportError(f"the stand-in for Gaudi could not be built: {done.stderr[-2000:]}")
            part.rename(built)
    return built


class Card:
    """What the card counts, and how a test makes it fail."""

    def __init__(self) -> None:
        path = str(_build())
        torch.ops.load_library(path)
        self._library = ctypes.CDLL(path)
        for name in ("card_get", "card_take_error", "card_take_for_graph", "card_ops", "card_mark", "card_wait"):
            getattr(self._library, name).restype = ctypes.c_int64

    def get(self, name: str) -> int:
        return self._library.card_get(name.encode())

    def set(self, name: str, value: int) -> None:
        self._library.card_set(name.encode(), ctypes.c_int64(value))

    def mark_step(self) -> None:
        self._library.card_mark_step()

    def settle(self) -> None:
        """An error that is due is raised."""
        self._say(self._library.card_take_error)

    def mark(self) -> int:
        """A place in the queue."""
        return self._library.card_mark()

    def wait(self, mark: int) -> None:
        """Until it is reached. Copies to the host that were queued before are there then, and an error that was due is
        raised."""
        self._say(self._library.card_wait, ctypes.c_int64(mark))

    def take_for_graph(self, num_bytes: int) -> None:
        self._say(self._library.card_take_for_graph, ctypes.c_int64(num_bytes))

    def _say(self, function, *about) -> None:
        text = ctypes.create_string_buffer(4096)
        length = function(*about, text, ctypes.c_int64(len(text)))
        if length:
            raise RuntimeError(text.raw[:length].decode())

    def ops(self) -> dict[tuple[str, int], int]:
        """Calls of each op by name and types; types are bits, one for each of torch's."""
        text = ctypes.create_string_buffer(_TEXT)
        length = self._library.card_ops(text, ctypes.c_int64(_TEXT))
        assert length <= _TEXT
        lines = [line.split() for line in text.raw[:length].decode().splitlines()]
        return {(name, int(types)): int(calls) for name, types, calls in lines}


card = Card()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    return torch.ops.hpu_emulated.host(tensor)


def to_card(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.hpu_emulated.card(tensor)
