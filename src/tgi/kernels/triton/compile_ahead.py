# pyright: basic, reportMissingImports=false
"""Compiles kernels on many threads, by going through the motions of a step without launching any.

Level 1. The specialisations are those that the step really asks for, so nobody has to list them.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

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
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, value.bit_length()
    return value


@contextmanager
def compile_only(num_threads: int) -> Iterator[None]:
    """Inside, kernels are compiled (or found on disk) instead of launched; on the way out all of them are ready."""
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
            kernels[id(self)] = self
            launch(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="tgi-compile") as threads, _Zeroes():
        JITFunction.run = compile_once
        try:
            with AsyncCompileMode(threads):
                yield
        finally:
            JITFunction.run = launch
    for kernel in kernels.values():
        for ready, *_ in kernel.device_caches.values():
            for key, found in ready.items():
                if isinstance(found, FutureKernel):  # two keys may have asked for one kernel
                    ready[key] = found.result()
