"""The backend that `torch.compile` finds under the name hpu_backend; without lazy mode only."""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import register_backend

from habana_frameworks.torch._emulation import books

_OPTIONS = {"keep_input_mutations", "force_static_compile"}


@register_backend(name="hpu_backend")
def hpu_backend(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    unknown = set(options or {}) - _OPTIONS
    if unknown:
        raise ValueError(f"hpu_backend does not know the options {sorted(unknown)}")
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            raise AssertionError(f"compiled with a dynamic shape: {value!r}")
    books.compilations += 1
    return graph.forward
