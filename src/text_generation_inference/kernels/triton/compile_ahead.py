# pyright: basic, reportMissingImports=false
"""Compiles kernels in many processes, by going through the motions of a step without launching any.

The specialisations are those that the step really asks for, so nobody has to list them. Processes leave what
they compile on disk (see `compile_worker`); here it is loaded, and compiled only where a process could not.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from text_generation_inference.kernels.triton.compile_worker import settle_keys
from text_generation_inference.kernels.triton.compile_workers import Workers

_ZEROED = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    Tensor.new_empty: Tensor.new_zeros,
}


class Zeroes(TorchFunctionMode):
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


class _ElsewhereMode(AsyncCompileMode):
    """Compiles what is not on disk in other processes, and loads it in threads."""

    def __init__(self, threads: ThreadPoolExecutor, workers: Workers | None, load: bool) -> None:
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
def begin_only(workers: Workers) -> Iterator[None]:
    """Inside, kernels are not launched: `workers` begin to compile those that are not ready. Nothing is waited for."""
    launch, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def begin(*, compile: dict[str, Any], **_: Any) -> bool:
        workers.begin(compile["specialization_data"])
        return True  # Triton takes it for kept elsewhere, and compiles nothing

    def ask(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        settle_keys(sys.modules[self.__module__])
        launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run, knobs.runtime.jit_cache_hook = ask, begin
    try:
        yield
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook


@contextmanager
def compile_only(num_threads: int, workers: Workers | None = None, load: bool = True) -> Iterator[None]:
    """Inside, kernels are compiled (or found on disk) instead of launched; on the way out all of them are ready.

    `workers`: processes that compile for threads, one for each; they are closed. `load`: there is a GPU to load kernels
    for.
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

    hook = knobs.runtime.jit_cache_hook
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="tgi-compile") as threads, Zeroes():
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
