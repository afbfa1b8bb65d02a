"""Which block holds which tokens after which prefix: the index behind prefix reuse.

A published block is found by (identity of its parent block, or root, and its tokens). Identities are never reused, and
the dictionary compares tokens and parent, not only their hash, so a hit is exact. There is at most one entry for each
block of the pool. Where only a window of the tokens before is read, a prefix is useful without its first blocks: then
an entry outlives its block for as long as there is a block behind it. Where some layers read a window and others all,
blocks of the former are found by the identities of the latter's (`BesideIndex`).
"""

from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from text_generation_inference.types import GenerationRequest


class PrefixRoot(NamedTuple):
    """What decides keys and values beside the tokens, and who may find them: requests share cached prefixes only where
    all of it is equal. In place of a parent before the first block."""

    salt: str = ""
    adapter: str | None = None
    depends_on: str = ""  # what else every token depends on


def root_of(source: GenerationRequest, depends_on: str = "") -> PrefixRoot:
    return PrefixRoot(source.cache_salt, source.adapter, depends_on)


def prefix_tokens(source: GenerationRequest) -> list[int]:
    """The prompt's tokens as prefixes are compared by: those in whose place a picture's features stand are numbers
    below 0, made of its whole digest and the place in it."""
    tokens = list(source.token_ids)
    for span in source.pictures:
        key = int(span.digest, 16) << 32
        place = 0
        for start, length in span.runs:
            tokens[start : start + length] = range(-(key + place) - 1, -(key + place + length) - 1, -1)
            place += length
    return tokens


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

    def remove(self, block: int) -> int:
        """Its identity, which no other will have."""
        identity, key = self._entry_by_block.pop(block)
        del self._block_by_key[key]
        return identity

    @property
    def identities(self) -> set[int]:
        return {identity for identity, _ in self._entry_by_block.values()}

    def __contains__(self, block: int) -> bool:
        return block in self._entry_by_block

    def __len__(self) -> int:
        return len(self._entry_by_block)

    def check(self, block_size: int) -> None:
        assert len(self._block_by_key) == len(self._entry_by_block)
        for block, (_, key) in self._entry_by_block.items():
            assert self._block_by_key[key] == block, f"block {block} is published under a key of another block"
            assert len(key[1]) == block_size, f"block {block} is published before it is full"


@dataclass(slots=True)
class _Entry:
    key: tuple[object, tuple[int, ...]]
    block: int  # 0: gone
    num_children: int = 0  # entries whose parent it is


class WindowPrefixIndex:
    """`PrefixIndex` of a pool with a window: `find` may give block 0, for tokens whose block is gone."""

    def __init__(self) -> None:
        self._identity_by_key: dict[tuple[object, tuple[int, ...]], int] = {}
        self._identity_by_block: dict[int, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._identities = count(1)

    def find(self, parent: object, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        identity = self._identity_by_key.get((parent, tokens))
        return None if identity is None else (self._entries[identity].block, identity)

    def insert(self, parent: object, tokens: tuple[int, ...], block: int) -> int:
        """Publish a block under a key that is not present, or whose block is gone."""
        assert block and block not in self._identity_by_block
        key = (parent, tokens)
        identity = self._identity_by_key.get(key)
        if identity is None:
            identity = self._identity_by_key[key] = next(self._identities)
            self._entries[identity] = _Entry(key, block)
            before = self._parent_of(key)
            if before is not None:
                before[1].num_children += 1
        else:
            entry = self._entries[identity]
            assert not entry.block
            entry.block = block
        self._identity_by_block[block] = identity
        return identity

    def remove(self, block: int) -> int:
        """Its identity."""
        removed = identity = self._identity_by_block.pop(block)
        entry = self._entries[identity]
        entry.block = 0
        while not entry.block and not entry.num_children:
            del self._entries[identity], self._identity_by_key[entry.key]
            before = self._parent_of(entry.key)
            if before is None:
                break
            identity, entry = before
            entry.num_children -= 1
        return removed

    def _parent_of(self, key: tuple[object, tuple[int, ...]]) -> tuple[int, _Entry] | None:
        """None: a root, or an entry that is gone, which nothing behind it can be found without."""
        identity = key[0]
        entry = self._entries.get(identity) if isinstance(identity, int) else None
        return None if entry is None or not isinstance(identity, int) else (identity, entry)

    @property
    def identities(self) -> set[int]:
        return set(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._identity_by_block

    def __len__(self) -> int:
        return len(self._identity_by_block)

    def check(self, block_size: int) -> None:
        assert len(self._identity_by_key) == len(self._entries)
        children: dict[object, int] = {}
        for identity, entry in self._entries.items():
            assert self._identity_by_key[entry.key] == identity
            assert len(entry.key[1]) == block_size, f"block {entry.block} is published before it is full"
            assert entry.block == 0 or self._identity_by_block[entry.block] == identity
            assert entry.block or entry.num_children, "an entry without a block, and none behind it"
            children[entry.key[0]] = children.get(entry.key[0], 0) + 1
        for identity, entry in self._entries.items():
            assert entry.num_children == children.get(identity, 0)
        assert len(self._identity_by_block) == sum(1 for entry in self._entries.values() if entry.block)


class BesideIndex:
    """Which block of a second pool holds the tokens of a block of the first: by the identity that this one has."""

    def __init__(self) -> None:
        self._block_by_identity: dict[int, int] = {}
        self._identity_by_block: dict[int, int] = {}

    def find(self, identity: int) -> int:
        """0: none."""
        return self._block_by_identity.get(identity, 0)

    def insert(self, identity: int, block: int) -> None:
        assert identity not in self._block_by_identity and block not in self._identity_by_block
        self._block_by_identity[identity] = block
        self._identity_by_block[block] = identity

    def remove(self, block: int) -> int:
        identity = self._identity_by_block.pop(block)
        del self._block_by_identity[identity]
        return identity

    @property
    def identities(self) -> set[int]:
        return set(self._block_by_identity)

    def __contains__(self, block: int) -> bool:
        return block in self._identity_by_block

    def check(self, block_size: int) -> None:
        assert self._identity_by_block == {block: identity for identity, block in self._block_by_identity.items()}
