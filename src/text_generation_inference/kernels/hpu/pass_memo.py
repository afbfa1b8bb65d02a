"""What all layers of a pass read of its lists: masks, mappings, angles. The first layer that needs it computes it; to
layers that are compiled by themselves it is handed in the lists."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_MOST_PASSES = 2  # a pass may have one within, of pictures
_Found = TypeVar("_Found")


class PassMemo:
    def __init__(self) -> None:
        self._passes: dict[int, tuple[object, dict[object, tuple[object, Any]]]] = {}

    def once(
        self, meta: Any, name: str, key: object, make: Callable[[], _Found], named: tuple[object, ...] = ()
    ) -> _Found:
        """`meta`: whose pass it is. `named`: objects that are part of the key, and `key` what else one of this name
        depends on. In a layer that is compiled by itself: what it was handed by name; else it computes its own, as
        what it left elsewhere, and where objects lie, would be no part of its program."""
        if torch.compiler.is_compiling():
            handed = meta.known.get(name) if meta.known is not None else None
            return make() if handed is None else handed
        key = (name, key, *map(id, named))
        known = self._passes.get(id(meta))
        if known is None:
            if len(self._passes) >= _MOST_PASSES:
                self.clear()
            known = self._passes[id(meta)] = (meta, {})
        found = known[1].get(key)
        if found is None:
            found = known[1][key] = (named, make())
        return found[1]

    def clear(self) -> None:
        """The pass is over: nothing of it is held."""
        self._passes.clear()
