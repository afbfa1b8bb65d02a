# pyright: basic, reportMissingImports=false
"""Compiles kernels in many processes, by going through the motions of a step without launching any.

The specialisations are those that the step really asks for, so nobody has to list them. Processes leave what
they compile on disk (see `compile_worker`); here it is loaded, and compiled only where a process could not.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from text_generation_inference.kernels.triton.compile_worker import settle_keys

_ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}


class _Zeroes(TorchFunctionMode):
    """Nothing fills what kernels would have filled: it must at least hold numbers that are valid as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ZEROED.get(func, func)(*args, **(kwargs or {}))


def _describe(value: Any) -> Any:
    """At least as fine as what Triton specialises on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):  # Triton's descriptor of tiles, or Gluon's
        return value.base.dtype, tuple(value.block_shape)
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, value.bit_length()
    return value


class _Workers:
    """One `compile_worker` for each thread that asks, started when it first does."""

    def __init__(self) -> None:
        target = driver.active.get_current_target()
        described = json.dumps([target.backend, target.arch, target.warp_size])
        self._command = [sys.executable, "-m", "text_generation_inference.kernels.triton.compile_worker", described]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._own = threading.local()
        self._started: list[subprocess.Popen[str]] = []

    def compile(self, described: str) -> None:
        """Leaves the kernel on disk, if all goes well."""
        with suppress(OSError):
            worker = getattr(self._own, "worker", None)
            if worker is None:
                worker = self._own.worker = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, text=True,
                )  # fmt: skip
                self._started.append(worker)
            worker.stdin.write(described + "\n")
            worker.stdin.flush()
            worker.stdout.readline()

    def close(self) -> None:
        for worker in self._started:
            with suppress(OSError):
                worker.stdin.close()  # pyright: ignore
        for worker in self._started:
            worker.wait()
            worker.stdout.close()  # pyright: ignore


class _ElsewhereMode(AsyncCompileMode):
    """Compiles what is not on disk in other processes, and loads it in threads."""

    def __init__(self, threads: ThreadPoolExecutor, workers: _Workers | None, load: bool) -> None:
        super().__init__(threads)
        self._workers, self._load = workers, load
        self._asked: tuple[str, str] = ("", "")  # name and description of the kernel that is submitted next

    def note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's hook for whoever keeps compiled kernels himself. False: do compile it."""
        self._asked = fn.name, compile["specialization_data"]
        return False

    def submit(self, key: str, compile_fn: Callable[[], Any], *finish: Any) -> FutureKernel:
        (name, described), folder = self._asked, hashlib.sha256(key.encode()).hexdigest()

        def make() -> Any:
            if self._workers is not None and not get_cache_manager(folder).get_group(f"{name}.json"):
                self._workers.compile(described)
            kernel = compile_fn()
            if self._load:
                _ = kernel.run  # also compiles what launches it, in some versions with a C compiler
            return kernel

        return super().submit(key, make, *finish)


@contextmanager
def compile_only(num_threads: int, processes: bool = False, load: bool = True) -> Iterator[None]:
    """Inside, kernels are compiled (or found on disk) instead of launched; on the way out all of them are ready.

    `processes`: each thread has one of its own compile for it; `load`: there is a GPU to load them quantize_for.
    """
    launch = JITFunction.run
    seen: set[Any] = set()
    kernels: dict[int, JITFunction] = {}

    def compile_once(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = tuple(
            value if parameter.is_constexpr else _describe(value)
            for value, parameter in zip(args, self.params, strict=False)
        )
        variable = {parameter.name for parameter in self.params if not parameter.is_constexpr}
        named = tuple((name, _describe(value) if name in variable else value) for name, value in options.items())
        key = (id(self), given, named)
        if key not in seen:
            seen.add(key)
            if id(self) not in kernels:
                kernels[id(self)] = self
                settle_keys(sys.modules[self.__module__])
            launch(self, *args, grid=grid, warmup=True, **options)

    workers = _Workers() if processes else None
    hook = knobs.runtime.jit_cache_hook
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="tgi-compile") as threads, _Zeroes():
            mode = _ElsewhereMode(threads, workers, load)
            JITFunction.run, knobs.runtime.jit_cache_hook = compile_once, mode.note
            try:
                with mode:
                    yield
            finally:
                JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook
    finally:
        if workers is not None:
            workers.close()
    for kernel in kernels.values():
        for ready, *_ in kernel.device_caches.values():
            for key, found in ready.items():
                if isinstance(found, FutureKernel):  # two keys may have asked for one kernel
                    ready[key] = found.result()
