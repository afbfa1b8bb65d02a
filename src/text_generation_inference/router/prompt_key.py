"""A prompt as a chain of hashes: one for each prefix of it that ends where a block ends.

Two prompts have the same hash at a place if they are equal up to there and have equal roots: a root is whatever else
decides what may be shared (salt, adapter, images). Blocks are small at the beginning, where prompts differ most, and
grow: 16 tokens up to 256, 64 up to 4,096, 256 beyond, so that of a common prefix less than one block is overlooked: 15
tokens, or a fifth of it at most. Where tokens are not known, text is cut at four characters (or bytes) for a token.

Hashes are Python's own of 64 bits and mean something in one process only. Two that are equal by accident, or made
equal by somebody who tries, send a request to a replica that does not hold its prompt: what the replica then finds in
its cache is its own business, and exact.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence

CHARACTERS_PER_TOKEN = 4
_SIZES = ((256, 16), (4_096, 64))  # up to this many tokens, blocks of this size
_LARGEST = 256

_ends: list[int] = []  # of blocks, in tokens; as far as anybody has asked
_sizes: list[int] = []  # likewise


class PromptKey:
    """`hashes[i]` is of the first `ends[i]` tokens; those behind the last block are not told apart."""

    __slots__ = ("hashes", "num_tokens")

    def __init__(self, hashes: list[int], num_tokens: int) -> None:
        self.hashes = hashes
        self.num_tokens = num_tokens

    def tokens_at(self, num_blocks: int) -> int:
        """Tokens of so many leading blocks."""
        return _ends[num_blocks - 1] if num_blocks else 0


def key_of_tokens(token_ids: Sequence[int], root: Hashable = ()) -> PromptKey:
    tokens = tuple(token_ids)
    parent = hash(("tokens", root))
    hashes: list[int] = []
    start = 0
    for end in _block_ends(len(tokens)):
        parent = hash((parent, tokens[start:end]))
        hashes.append(parent)
        start = end
    return PromptKey(hashes, len(tokens))


def key_of_text(text: str | bytes, root: Hashable = ()) -> PromptKey:
    """The same of a text whose tokens are not known, cut at every four characters. Text and bytes are told apart."""
    num_tokens = -(-len(text) // CHARACTERS_PER_TOKEN)
    parent = hash(("text", root))
    hashes: list[int] = []
    start = 0
    for end in _block_ends(len(text) // CHARACTERS_PER_TOKEN):
        end *= CHARACTERS_PER_TOKEN
        parent = hash((parent, text[start:end]))
        hashes.append(parent)
        start = end
    return PromptKey(hashes, num_tokens)


def block_sizes() -> list[int]:
    """How many tokens each block has, as far as there are keys."""
    return _sizes


def _block_ends(num_tokens: int) -> list[int]:
    while not _ends or _ends[-1] < num_tokens:
        last = _ends[-1] if _ends else 0
        size = next((size for limit, size in _SIZES if last < limit), _LARGEST)
        _ends.append(last + size)
        _sizes.append(size)
    return _ends[: bisect_right(_ends, num_tokens)]
