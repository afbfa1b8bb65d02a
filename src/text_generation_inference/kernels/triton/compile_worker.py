# pyright: basic, reportMissingImports=false
"""A program that compiles kernels into Triton's cache on disk.

Takes the target on standard input, then one specialisation per line, as Triton itself describes them in JSON, and
answers each of these with a line that is empty if it is on disk now, or says why not. Ends with its input. Needs no
GPU, and no torch: a process of its own because the front half of Triton's compiler is Python, of which a process runs
one thread at a time.
"""

import importlib
import json
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


def settle_keys(module: ModuleType) -> None:
    """Have Triton compute what it finds a module's functions by on disk, each after the functions that it calls.

    Some versions come to another key for a caller if that is asked first. All processes must come to the same.
    """
    for function in list(vars(module).values()):
        if isinstance(function, JITFunction) and function.hash is None:
            if function.__module__ != module.__name__:
                settle_keys(sys.modules[function.__module__])
            _ = function.cache_key


class _NoTorch(ModuleType):
    """Stands in for torch, whose import takes seconds: kernels' modules use it on the host's side only."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _NoDevice:
    """Stands in for a driver where a compiler asks what to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def _compile(described: str) -> str:
    try:
        module, _, name = json.loads(described)["name"].rpartition(".")
        kernels = importlib.import_module(module)
        settle_keys(kernels)
        getattr(kernels, name).preload(described)
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return ""


def main() -> None:
    torch, nn, functional = (_NoTorch(name) for name in ("torch", "torch.nn", "torch.nn.functional"))
    torch.nn, nn.functional = nn, functional
    sys.modules.update({module.__name__: module for module in (torch, nn, functional)})
    with suppress(Exception):  # the largest of all kernels, and what it needs of Triton
        importlib.import_module("text_generation_inference.kernels.triton.hopper_attention")
    target = sys.stdin.readline()
    if not target:
        return
    driver.set_active(_NoDevice(GPUTarget(*json.loads(target))))  # pyright: ignore
    for line in sys.stdin:
        print(_compile(line), flush=True)


if __name__ == "__main__":
    main()
