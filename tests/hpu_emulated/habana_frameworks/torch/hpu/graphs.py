"""HPU graphs: what a forward pass does is recorded op by op when a key is first seen, and replayed afterwards.

A replay runs the recorded ops, not the Python that made them: a number that Python computed is frozen in the graph, as it
is on the card, and looking at a value on the host while recording is an error.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from habana_frameworks.torch._card import card
from habana_frameworks.torch._emulation import books
from habana_frameworks.torch.core import mark_step

_SHAPE_FROM_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class CaptureError(RuntimeError):
    """What was recorded cannot be a graph."""


@dataclass(slots=True)
class _Step:
    op: Callable[..., Any]
    args: tuple[Any, ...]  # tensors as `_Slot`
    kwargs: dict[str, Any]
    outputs: list[int | None]  # slots of the flattened result
    freed: list[int] = field(default_factory=list)  # not needed after this step


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int


def _leaves(tree: Any) -> Iterator[Any]:
    """What is in lists, tuples and dicts."""
    if isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree


def _replace(tree: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    if isinstance(tree, kind):
        return new(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_replace(value, kind, new) for value in tree])
    if isinstance(tree, dict):
        return {name: _replace(value, kind, new) for name, value in tree.items()}
    return tree


class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.kept: list[Tensor] = []  # keeps ids from being used twice
        self.slots: dict[int, int] = {}
        self.constants: dict[int, Tensor] = {}
        self.made: dict[int, int] = {}  # storage -> bytes, of what the pass allocates
        self.inputs = [self._slot(tensor) for tensor in inputs]

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = len(self.kept)
            self.kept.append(tensor)
        return self.slots[id(tensor)]

    def read(self, tensor: Tensor) -> int:
        known = id(tensor) in self.slots
        number = self._slot(tensor)
        if not known:
            self.constants[number] = tensor  # a weight, a cache: its address is part of the graph
        return number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = list(_leaves((args, kwargs or {})))
        by_mask = func is torch.ops.aten.index.Tensor and any(
            isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves[1:]
        )
        shaped = func is not torch.ops.aten.index.Tensor and any(tag in func.tags for tag in _SHAPE_FROM_VALUES)
        if (by_mask or shaped) and books.capturing:
            raise CaptureError(f"{func} has a result whose shape or use depends on values; a graph cannot hold it")
        slots = _replace((args, kwargs or {}), Tensor, lambda tensor: _Slot(self.read(tensor)))
        result = func(*args, **(kwargs or {}))
        outputs: list[int | None] = []
        for value in _leaves(result):
            if not isinstance(value, Tensor):
                outputs.append(None)
                continue
            outputs.append(self._slot(value))
            storage = value.untyped_storage()
            self.made.setdefault(storage.data_ptr(), storage.nbytes())
        self.steps.append(_Step(func, *slots, outputs))
        return result


class HPUGraph:
    """A recording. `capture_begin` ... `capture_end` around the work, with the inputs marked before it."""

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None
        self._marked: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._bytes = 0

    def capture_begin(self, dry_run: bool = False) -> None:
        assert not books.capturing, "one capture at a time"
        books.capturing = True
        self._recorder = _Recorder(self._marked)
        self._recorder.__enter__()

    def mark_user_inputs(self, static_tlist: list[Tensor]) -> None:
        assert self._recorder is not None and not self._recorder.steps, "marked once the capture has begun, before work"
        self._recorder.inputs = [self._recorder._slot(tensor) for tensor in static_tlist]
        self._marked = [torch.empty_like(tensor, device="meta") for tensor in static_tlist]
        self._recorder.steps.clear()  # that was no work of the pass

    def mark_user_outputs(self, static_tlist: list[Tensor]) -> None:
        self._outputs = list(static_tlist)

    def capture_end(self) -> None:
        self.abandon()
        books.compilations += 1

    def count_unread(self, num_inputs: int) -> int:
        recorder = self._recorder
        assert recorder is not None
        read = {leaf.number for step in recorder.steps for leaf in _leaves((step.args, step.kwargs)) if isinstance(leaf, _Slot)}  # fmt: skip
        return sum(number not in read for number in recorder.inputs[:num_inputs])

    def abandon(self) -> None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        books.capturing = False

    def finish(self, outputs: list[Tensor]) -> None:
        """What the pass returned; plans what can be freed when, and takes the graph's memory."""
        recorder = self._recorder
        assert recorder is not None
        self._outputs = outputs
        self._output_slots = [recorder.read(tensor) for tensor in outputs]
        last: dict[int, _Step] = {}
        for step in recorder.steps:
            for leaf in _leaves((step.args, step.kwargs)):
                if isinstance(leaf, _Slot):
                    last[leaf.number] = step
            for number in step.outputs:
                if number is not None:
                    last[number] = step
        for number, step in last.items():
            if number not in recorder.constants and number not in self._output_slots:
                step.freed.append(number)
        num_bytes = _peak_bytes(recorder)
        self._num_slots = len(recorder.kept)
        recorder.kept.clear()
        recorder.slots.clear()
        card.take_for_graph(num_bytes)
        self._bytes = num_bytes

    def replay(self, asynchronous: bool = False) -> None:
        self.replayV3([], asynchronous)

    def replayV3(self, tlistI: list[Tensor], asynchronous: bool = False) -> None:
        recorder = self._recorder
        assert recorder is not None and not books.capturing
        if card.get("broken"):
            return  # nothing is computed until somebody is told
        values: list[Tensor | None] = [None] * self._num_slots
        for number, tensor in recorder.constants.items():
            values[number] = tensor
        for number, tensor, captured in zip(recorder.inputs, tlistI, self._marked, strict=True):
            if tensor.dtype is not captured.dtype:
                raise RuntimeError(
                    f"captured with {captured.dtype}, replayed with {tensor.dtype}: the key does not tell"
                )
            values[number] = tensor
        with books.in_a_graph():
            self._run(values)

    def _run(self, values: "list[Tensor | None]") -> None:
        recorder = self._recorder
        assert recorder is not None
        for step in recorder.steps:
            args, kwargs = _replace((step.args, step.kwargs), _Slot, lambda slot: values[slot.number])
            result = step.op(*args, **kwargs)
            results = (result,) if isinstance(result, Tensor) else _leaves(result)
            for number, value in zip(step.outputs, results, strict=True):
                if number is not None:
                    values[number] = value
                elif isinstance(value, torch.ScriptObject):
                    value.wait()  # a sum over ranks: in the card's queue, what follows it comes after it
            for number in step.freed:
                values[number] = None
        for number, output in zip(self._output_slots, self._outputs, strict=True):
            value = values[number]
            assert value is not None
            if value is not output:
                output.copy_(value)

    def clear_inputs(self) -> None: ...

    def reset(self) -> None:
        card.take_for_graph(-self._bytes)
        self._bytes = 0

    def __del__(self) -> None:
        self.reset()


def _peak_bytes(recorder: _Recorder) -> int:
    """The most that the results of ops hold at a time when each is freed after its last use."""
    storage_of = {number: tensor.untyped_storage().data_ptr() for number, tensor in enumerate(recorder.kept)}
    owned = {storage_of[number] for number in (*recorder.inputs, *recorder.constants)}
    last_use: dict[int, int] = {}
    for position, step in enumerate(recorder.steps):
        read = [leaf.number for leaf in _leaves((step.args, step.kwargs)) if isinstance(leaf, _Slot)]
        for number in read + step.outputs:
            if number is not None:
                last_use[storage_of[number]] = position
    ends: dict[int, list[int]] = {}
    for storage, position in last_use.items():
        ends.setdefault(position, []).append(storage)
    held: dict[int, int] = {}
    now = peak = 0
    for position, step in enumerate(recorder.steps):
        for number in step.outputs:
            storage = None if number is None else storage_of[number]
            if storage is not None and storage not in owned and storage not in held:
                held[storage] = recorder.made[storage]
                now += held[storage]
        peak = max(peak, now)
        now -= sum(held.pop(storage, 0) for storage in ends.get(position, []))
    return peak


class graph:
    """`with graph(hpu_graph):` records; the work must leave its result in tensors made before."""

    def __init__(self, hpu_graph: HPUGraph, stream: Any = None, dry_run: bool = False) -> None:
        self.hpu_graph, self.dry_run = hpu_graph, dry_run

    def __enter__(self) -> None:
        self.hpu_graph.capture_begin(self.dry_run)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.hpu_graph.abandon()
            return
        self.hpu_graph.capture_end()
        self.hpu_graph.finish([])


def input_hash(obj: Any) -> int:
    """Tensors by shape and view; lists, tuples and dicts by element; all else by the hash of its value."""
    return int.from_bytes(hashlib.blake2b(repr(key_of(obj)).encode(), digest_size=8).digest(), "big")


def key_of(obj: Any) -> Any:
    if isinstance(obj, Tensor):
        whole = obj.is_contiguous() and obj.untyped_storage().nbytes() == obj.numel() * obj.element_size()
        return ("tensor", tuple(obj.shape), None if whole else (obj.stride(), obj.storage_offset()))
    if isinstance(obj, dict):
        return ("dict", tuple((name, key_of(value)) for name, value in obj.items()))
    if isinstance(obj, (list, tuple)):
        return ("list", tuple(key_of(value) for value in obj))
    return ("value", type(obj).__name__, hash(obj))


@dataclass(slots=True)
class _Captured:
    graph: HPUGraph
    result: Any
    inputs: list[Tensor]  # with the tensor cache: what every call is copied into
    copies_unread: bool  # inputs that the graph does not read: copied at each hit, and the first time that is compiled


def wrap_in_hpu_graph(
    module: Any,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> Any:
    """Replaces `module.forward`; `module.clear_cache()` drops all graphs."""
    override = os.environ.get("PT_HPUGRAPH_DISABLE_TENSOR_CACHE")
    if override is not None:
        disable_tensor_cache = override == "1"
    original = module.forward
    cache: dict[int, _Captured] = {}

    def capture(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captured:
        inputs = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        recording = HPUGraph()
        recording.capture_begin(dry_run=True)
        recording.mark_user_inputs(inputs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            recording.abandon()
            raise
        recording.capture_end()
        unread = recording.count_unread(len(inputs))
        books.unread_inputs += unread
        recording.finish([leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)])
        kept = [] if disable_tensor_cache else [tensor.clone() for tensor in inputs]
        return _Captured(recording, result, kept, unread > 0)

    def run(key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Without a graph."""
        books.compiled((id(module), key))
        return original(*args, **kwargs)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        bypass = kwargs.pop("bypass_hpu_graphs", False)
        warmup_mode = kwargs.pop("warmup_mode", False)
        kwargs.pop("cache_tensors_list", None)
        key = input_hash((args, kwargs))
        if bypass:
            return run(key, args, kwargs)
        captured = cache.get(key)
        if captured is None:
            if max_graphs is not None and len(cache) >= max_graphs:
                return run(key, args, kwargs)
            captured = cache[key] = capture(args, kwargs)
            return captured.result
        if warmup_mode:
            mark_step()
            return captured.result
        if captured.copies_unread:
            captured.copies_unread = False
            books.compilations += 1
        inputs = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for kept, given in zip(captured.inputs, inputs, strict=False):
            kept.copy_(given)
        captured.graph.replayV3(captured.inputs or inputs, asynchronous)
        return captured.result

    def clear_inputs() -> None:
        for captured in cache.values():
            captured.graph.clear_inputs()

    module.forward = forward
    module.clear_cache = cache.clear
    module.clear_inputs = clear_inputs
    return module


__all__ = ["HPUGraph", "graph", "input_hash", "wrap_in_hpu_graph"]
