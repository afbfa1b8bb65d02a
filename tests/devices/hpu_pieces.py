"""What a card in lazy mode compiles outside graphs, as the stand-in sees it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_VIEWS = ("slice", "view", "select", "alias")  # alone they launch nothing


class Pieces(TorchDispatchMode):
    """Ops on the card's tensors, gathered until `mark_step` or a look at a value. A piece is known by its ops and
    shapes. Entered on the thread where steps run."""

    def __init__(self, books: Any, card: Any) -> None:
        super().__init__()
        self._books, self._card = books, card
        self.met: set[tuple] = set()
        self._piece: list[tuple] = []
        self._launched = self._launches
        self.quiet = False

    @property
    def _launches(self) -> tuple[int, int]:
        return self._books.mark_steps, self._card.get("reads")

    def close(self) -> None:
        if any(op.split(".")[1] not in _VIEWS for op, *_ in self._piece):
            self.met.add(tuple(self._piece))
        self._piece, self._launched = [], self._launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self._launches != self._launched:
            self.close()
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_read = self._card.get("reads") != self._launched[1]
        if not (self.quiet or self._books.capturing or is_read) and any(
            tensor.device.type == "hpu" for tensor in given
        ):
            self._piece.append((str(func), *(tuple(tensor.shape) for tensor in given)))
        return out


@contextmanager
def gathered(submit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieces]:
    """Those of steps, whose thread `submit` gives work to; replays of graphs are none."""
    from habana_frameworks.torch._card import card
    from habana_frameworks.torch._emulation import books
    from habana_frameworks.torch.hpu.graphs import HPUGraph

    pieces = Pieces(books, card)
    replay = HPUGraph.replayV3

    def replay_by_itself(graph, *inputs):
        pieces.close()
        pieces.quiet = True
        replay(graph, *inputs)
        pieces.quiet = False

    monkeypatch.setattr(HPUGraph, "replayV3", replay_by_itself)
    submit(pieces.__enter__).result()
    yield pieces
    submit(lambda: pieces.__exit__(None, None, None)).result()
