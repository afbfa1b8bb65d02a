"""The passes of a plan on a Gaudi card: captured as HPU graphs in lazy mode, compiled layer by layer without it."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import key_of, put_together, take_apart
from text_generation_inference.kernels.hpu.bridge import Bridge, memory_errors
from text_generation_inference.kernels.packed import Layout, can_pack, pack, unpack

_torch: Any = torch  # for what torch leaves without types
_COMPILED_SHAPES = 4096  # torch.compile gives up on a function with more; the bucket plan says how many there are
# By their names since torch 2.7, and those before.
_SHAPE_LIMITS = (
    ("recompile_limit", "cache_size_limit"),
    ("accumulated_recompile_limit", "accumulated_cache_size_limit"),
)
Call = Callable[..., Any]  # (tensors in a dict or list, bypass, what else a graph is found by) -> tensors
_PACKED = "words"  # the tensor that holds others
_GRAPH_CALLS = 3  # until a graph meets nothing new: capturing, the first replay, and what that copies


def _shapes_of(tensors: dict[str, Tensor] | list[Tensor]) -> tuple[object, ...]:
    named = tensors.items() if isinstance(tensors, dict) else enumerate(tensors)
    return tuple((name, tuple(tensor.shape)) for name, tensor in named)


class PureFunction(nn.Module):
    """A function that may overwrite the first of its tensors, unless it `keeps` it: a graph changes none of its
    inputs.

    Of a method the object is kept by itself: the compiler of torch 2.7 loses it, and what it has, when it is bound."""

    def __init__(self, function: Callable[..., Any], keeps: bool = False) -> None:
        super().__init__()
        self._about = (function.__self__,) if isinstance(function, MethodType) else ()
        self._function = function.__func__ if isinstance(function, MethodType) else function
        self._keeps = keeps

    def forward(self, tensors: list[Tensor], layout: Layout = ()) -> Any:
        """`layout`: of the last tensor, which holds the last arguments."""
        if layout:
            tensors = [*tensors[:-1], *unpack(tensors[-1], layout).values()]
        first = tensors[0] if self._keeps else tensors[0].clone()
        return self._function(*self._about, first, *tensors[1:])


class PaddedPass(nn.Module):
    """A graph is found by the shapes of tensors in dicts and lists; any other object would be known by its address."""

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        super().__init__()
        self._pass = forward

    def forward(self, tensors: dict[str, Tensor], layout: Layout = ()) -> Tensor:
        """`layout`: what the packed tensor holds."""
        if layout:
            rest = {name: tensor for name, tensor in tensors.items() if name != _PACKED}
            tensors = {**unpack(tensors[_PACKED], layout), **rest}
        return self._pass(put_together(tensors))


class PackedInputs:
    """Sends what a pass reads of the host in one copy.

    It is one input of the graph, too. An input that a graph does not read is copied into it at every replay, and the
    first such copy is compiled while requests wait; a part of one that it does not read is not.
    """

    def __init__(self, call: "Call", device: torch.device) -> None:
        self._call, self._device = call, device

    def __call__(self, tensors: dict[str, Tensor], bypass: bool) -> Any:
        on_host = {name: tensor for name, tensor in tensors.items() if can_pack(tensor)}
        if not on_host:
            return self._call(tensors, bypass)
        words, layout = pack(on_host)
        rest = {name: tensor for name, tensor in tensors.items() if name not in on_host}
        return self._call({_PACKED: words.to(self._device, non_blocking=True), **rest}, bypass, layout)


class GraphPasses:
    """Runs passes by the given call: (tensors, bypass) -> logits. On one thread, as ops are gathered by thread."""

    def __init__(self, bridge: Bridge, call: Call, captures: bool, forget: Callable[[], None]) -> None:
        """`forget`: what is known of a pass, once it is over."""
        self._bridge, self._call, self._captures, self._forget = bridge, call, captures, forget
        self._captured: set[object] = set()  # keys

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def __call__(self, batch: Batch, bypass: bool = False) -> Tensor:
        try:
            with memory_errors():
                out = self._call(take_apart(batch), bypass)
                self._bridge.mark_step()
        finally:
            self._forget()
        if self._captures and not bypass:
            self._captured.add(key_of(batch))
        return out


def ungraphed(module: nn.Module) -> Call:
    def call(tensors: Any, bypass: bool, *about: Any) -> Any:
        return module(tensors, *about)

    return call


def hpu_graphs(bridge: Bridge, module: nn.Module) -> Call:
    """Lazy mode. The result is the same tensor for every replay of a graph."""
    # Inputs are bound to a graph rather than copied into it, so that it holds no memory for them.
    graphed = bridge.torch_hpu.wrap_in_hpu_graph(module, disable_tensor_cache=True)
    met: set[object] = set()

    def call(tensors: Any, bypass: bool, *about: Any) -> Any:
        if bypass:
            return graphed(tensors, *about, bypass_hpu_graphs=True)
        out = graphed(tensors, *about)
        key = (_shapes_of(tensors), about)
        if key not in met:  # a pass changes nothing if it is done again
            for _ in range(_GRAPH_CALLS - 1):
                bridge.synchronize()
                out = graphed(tensors, *about)
            met.add(key)
        return out

    return call


def allow_many_shapes() -> None:
    """On the thread where steps run: the limits are each thread's own."""
    import torch._dynamo.config as dynamo

    for newer, older in _SHAPE_LIMITS:
        name = newer if hasattr(dynamo, newer) else older
        setattr(dynamo, name, max(_COMPILED_SHAPES, getattr(dynamo, name)))


def compiled(module: nn.Module) -> Call:
    """Without lazy mode: a program for each shape, made by torch.compile.

    What it cannot follow (a tower's pass, which could be left after each part) it gives up by its code, and compiles
    what is called there: others must not share that code, or they were compiled anew.
    """
    module.forward = _with_own_code(module.forward)
    options = {"keep_input_mutations": True}
    program = _torch.compile(module, backend="hpu_backend", dynamic=False, options=options)

    def call(tensors: Any, bypass: bool, *about: Any) -> Any:
        return (module if bypass else program)(tensors, *about)

    return call


def _with_own_code(method: Any) -> Any:
    """The method of an object, with a copy of the code of its class."""
    function = method.__func__
    parts = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied = FunctionType(function.__code__.replace(), *parts)
    copied.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copied, method.__self__)


class CompiledLayers:
    """Layers compiled one by one: those of a kind share a program for each shape, where a pass as a whole would be
    compiled anew, all of it, for each."""

    def __init__(self, hand_over: Callable[..., None] | None) -> None:
        """`hand_over`: what attention reads of a pass's lists, to the layer that comes next; None: nothing."""
        self._program, self._hand_over = _compile(_run_layer), hand_over
        self._functions: dict[object, Any] = {}
        self.is_on = False

    def __call__(self, layer: Any, *about: Any) -> Any:
        if not self.is_on:
            return _run_layer(layer, *about)
        x, residual, batch, cos_sin, cache, _ = about
        stream, attention = x if residual is None else residual, layer.attention
        heads: Any = getattr(attention, "heads", None)
        # Attention over latents reads lists in its own way, and so does what the card's kernels do not know.
        if self._hand_over is not None and hasattr(heads, "softcap") and isinstance(stream, Tensor):
            is_plain = attention.slopes is None and attention.sinks is None and heads.attention_chunk is None
            if is_plain:
                about_heads = (heads.window, heads.softcap)
                self._hand_over(batch, cos_sin, cache[0].shape[1], stream.dtype, *about_heads, self._run_function)
        elif self._hand_over is not None and isinstance(stream, Tensor) and batch.cross is not None:
            self._hand_over_pictures(batch.cross.decode, cache[0].shape[1], stream.dtype)
        return self._program(layer, *about)

    def _hand_over_pictures(self, rows: Any, block_size: int, dtype: torch.dtype) -> None:
        """`rows`: that decode, and read pictures as if these were tokens, but for angles."""
        if self._hand_over is not None and rows is not None:
            self._hand_over(rows, None, block_size, dtype, None, None, self._run_function)

    def _run_function(self, function: Callable[..., Any], *given: Any) -> Any:
        if function not in self._functions:
            self._functions[function] = _compile(function)
        return self._functions[function](*given)


def _compile(function: Callable[..., Any]) -> Any:
    options = {"keep_input_mutations": True}
    return _torch.compile(function, backend="hpu_backend", dynamic=False, options=options)


def _run_layer(layer: Any, *about: Any) -> Any:
    return layer.forward(*about)


def by_layer(layers: CompiledLayers, module: nn.Module) -> Call:
    def call(tensors: Any, bypass: bool, *about: Any) -> Any:
        layers.is_on = not bypass
        try:
            return module(tensors, *about)
        finally:
            layers.is_on = False

    return call
