"""What goes between host and card, and what decode attention reads and writes of the KV cache, counted.

Here both memories are one, so a tensor is the card's because it was sent there, was made there, or is the result of an
op on such a tensor; what is sent or fetched is a copy. Ops are counted as Python asks for them, and each as reading and
writing its tensors in full: a card's compiler may join some of them. What a graph moves is counted as it is captured,
and again for every replay. Entered on the thread where steps run (`start`), lazy mode only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from habana_frameworks.torch.hpu.graphs import HPUGraph

_READS = {"cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "scaled_dot_product_attention"}
_PICKS = {"index_select", "__getitem__"}  # read what they return
_WRITES = {"index_copy_": 3, "__setitem__": 2, "copy_": 1}  # which argument is written into the first


@dataclass(slots=True)
class Counts:
    """Of one step, or of several."""

    sends: int = 0  # copies to the card
    bytes_sent: int = 0
    reads: int = 0  # times that values of the card come to the host
    waits: int = 0  # of these, that whoever asks for them waits
    bytes_fetched: int = 0
    cache_read: int = 0  # bytes of keys and values, or of copies of them, that ops read
    cache_copied: int = 0  # bytes of such copies that are written
    cache_written: int = 0  # bytes of new keys and values
    list_ops: int = 0  # ops on integers, with no number among them: block lists, positions, masks made of these

    def add(self, other: "Counts", sign: int = 1) -> "Counts":
        values = (getattr(self, field.name) + sign * getattr(other, field.name) for field in fields(self))
        return Counts(*values)


class Traffic(TorchFunctionMode):
    def __init__(self, card: torch.device, caches: Iterable[Tensor]) -> None:
        """`card`: the very object by which the device is named wherever something is sent there."""
        super().__init__()
        self.counts = Counts()
        self._card_device = card
        self._card = WeakIdKeyDictionary()
        self._copies = WeakIdKeyDictionary()  # of what is in the cache
        self._caches = {cache.untyped_storage().data_ptr() for cache in caches}
        self._of_graph: dict[int, Counts] = {}
        self._quiet = False

    def start(self) -> None:
        traffic = self
        self._originals = capture_begin, capture_end, replay = (
            HPUGraph.capture_begin,
            HPUGraph.capture_end,
            HPUGraph.replayV3,
        )
        before: dict[int, Counts] = {}

        def begin(graph: HPUGraph, dry_run: bool = False) -> None:
            before[id(graph)] = traffic.counts
            capture_begin(graph, dry_run)

        def end(graph: HPUGraph) -> None:
            capture_end(graph)
            traffic._of_graph[id(graph)] = traffic.counts.add(before.pop(id(graph)), -1)

        def replay_quietly(graph: HPUGraph, tensors: list[Tensor], asynchronous: bool = False) -> None:
            traffic._quiet = True
            try:
                replay(graph, tensors, asynchronous)
            finally:
                traffic._quiet = False
            traffic.counts = traffic.counts.add(traffic._of_graph.get(id(graph), Counts()))

        HPUGraph.capture_begin, HPUGraph.capture_end, HPUGraph.replayV3 = begin, end, replay_quietly
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)
        HPUGraph.capture_begin, HPUGraph.capture_end, HPUGraph.replayV3 = self._originals

    def take(self) -> Counts:
        """Since this was last asked."""
        found, self.counts = self.counts, Counts()
        return found

    # -- ops -------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = list(_tensors((args, kwargs)))
        first = given[0] if given else None
        if name in _READS and first is not None and first in self._card:
            return self._fetch(func, name, first, args, kwargs)
        out = func(*args, **kwargs)
        to_card = any(value is self._card_device for value in (*args, *kwargs.values()))
        if name == "copy_" and given[0] not in self._card and given[1] in self._card:
            self._count(reads=1, waits=not _queued(args, kwargs), bytes_fetched=_size(first))
            return out
        if name == "to" and to_card and first not in self._card:
            self._count(sends=1, bytes_sent=_size(first))
        made = list(_tensors(out))
        if to_card or any(tensor in self._card for tensor in given):
            for tensor in made:
                self._card[tensor] = True
            self._count_cache(name, args, given, made)
            numbers, integers = (
                any(test(tensor) for tensor in given) for test in (torch.is_floating_point, _is_integer)
            )
            if integers and not numbers:  # a view is no work, nor is a question about a tensor
                self._count(list_ops=any(not _shares(tensor, given) for tensor in made))
        return out

    def _fetch(self, func: Any, name: str, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        self._count(reads=1, waits=1, bytes_fetched=_size(tensor))
        return func(*args, **kwargs)

    def _count_cache(self, name: str, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        cached = [tensor for tensor in given if self._is_cached(tensor)]
        if not cached:
            return
        if name in _WRITES:
            self._count(cache_written=_size(args[_WRITES[name]]))
        elif name in _PRODUCTS:
            self._count(cache_read=sum(map(_size, cached)))
        else:
            new = [tensor for tensor in made if not _shares(tensor, given)]
            for tensor in made:
                self._copies[tensor] = True
            if new:
                copied = sum(map(_size, new))
                read = copied if name in _PICKS else sum(map(_size, cached))
                self._count(cache_read=read, cache_copied=copied)

    def _is_cached(self, tensor: Tensor) -> bool:
        return tensor in self._copies or tensor.untyped_storage().data_ptr() in self._caches

    def _count(self, **more: int) -> None:
        self.counts = self.counts.add(Counts(**more))


def _queued(args: Any, kwargs: Any) -> bool:
    """Whether a copy is asked for without waiting for it."""
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.device.type != "meta":
            yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _size(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def _shares(tensor: Tensor, given: list[Tensor]) -> bool:
    """Whether it is a view of one of these, or one of these itself."""
    place = tensor.untyped_storage().data_ptr()
    return any(place == other.untyped_storage().data_ptr() for other in given)
