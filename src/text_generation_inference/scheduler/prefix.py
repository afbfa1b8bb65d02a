"""Which block holds which tokens after which prefix: the index behind prefix reuse.

A published block is found by (identity of its parent block, or root, and its tokens). Identities are never reused, and
the dictionary compares tokens and parent, not only their hash, so a hit is exact. There is at most one entry for each
block of the pool.
"""

from itertools import count
from typing import NamedTuple

from text_generation_inference.types import GenerationRequest


class PrefixRoot(NamedTuple):
    """What decides keys and values beside the tokens, and who may find them: requests share cached prefixes only where
    all of it is equal. In place of a parent before the first block."""

    salt: str = ""
    adapter: str | None = None
    image_digests: tuple[str, ...] = ()


def root_of(source: GenerationRequest) -> PrefixRoot:
    return PrefixRoot(source.cache_salt, source.adapter, tuple(source.images))


class PrefixIndex:
    def __init__(self) -> None:
        self._block_by_key: dict[tuple[object, tuple[int, ...]], int] = {}
        self._entry_by_block: dict[int, tuple[int, tuple[object, tuple[int, ...]]]] = {}  # identity, key
        self._identities = count(1)

    def find(self, parent: object, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(block id, identity) of the block that holds `tokens` after `parent`, if any."""
        block = self._block_by_key.get((parent, tokens))
        return None if block is None else (block, self._entry_by_block[block][0])

    def insert(self, parent: object, tokens: tuple[int, ...], block: int) -> int:
        """Publish a block under a key that is not present; returns its identity."""
        key = (parent, tokens)
        assert key not in self._block_by_key and block not in self._entry_by_block
        identity = next(self._identities)
        self._block_by_key[key] = block
        self._entry_by_block[block] = (identity, key)
        return identity

    def remove(self, block: int) -> None:
        _, key = self._entry_by_block.pop(block)
        del self._block_by_key[key]

    def __contains__(self, block: int) -> bool:
        return block in self._entry_by_block

    def __len__(self) -> int:
        return len(self._entry_by_block)

    def check(self, block_size: int) -> None:
        assert len(self._block_by_key) == len(self._entry_by_block)
        for block, (_, key) in self._entry_by_block.items():
            assert self._block_by_key[key] == block, f"block {block} is published under a key of another block"
            assert len(key[1]) == block_size, f"block {block} is published before it is full"
