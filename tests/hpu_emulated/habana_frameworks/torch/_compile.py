"""The backend that `torch.compile` finds under the name hpu_backend; without lazy mode only.

Like Intel's it goes through AOTAutograd: what is compiled has no views of what it overwrites and no mutation but those of
inputs, which are kept in it where `keep_input_mutations` says so, and are copied back outside it otherwise.

What torch traces for a card has tensors that lie in order, whatever an op was given; here they may lie as its arguments
do, so that what is looked at in another shape may have to be copied.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd

from habana_frameworks.torch._emulation import books

_OPTIONS = {"keep_input_mutations", "force_static_compile"}


def _compile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    books.compilations += 1
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return graph.forward


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
        if value.device.type != "hpu":
            raise AssertionError(f"compiled with a tensor on {value.device}")
    keep = bool((options or {}).get("keep_input_mutations", False))
    through = aot_autograd(fw_compiler=_compile, keep_inference_input_mutations=keep)
    return through(graph, inputs)
