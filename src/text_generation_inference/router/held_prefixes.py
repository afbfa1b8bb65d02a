"""What one replica is believed to hold of prompts: hashes of blocks, the least recently used forgotten first.

A prompt is noted from its last block to its first, so a block is always older than those before it: what is forgotten
first is the end of a prompt, as in the replica's own cache, and of any prompt a leading part is known or nothing.
Bounded twice: by the tokens that the replica's cache has room for, and by `MAX_BLOCKS`, which bounds memory.
"""

from collections import OrderedDict

from text_generation_inference.router.prompt_key import PromptKey, block_sizes

MAX_BLOCKS = 65_536  # some 8 MB; at least 1 million tokens, 16 million of long prompts


class HeldPrefixes:
    def __init__(self, capacity_tokens: int | None = None, max_blocks: int = MAX_BLOCKS) -> None:
        """`capacity_tokens`: of the replica's cache; None: not known."""
        self._tokens_by_hash: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self.capacity_tokens = capacity_tokens
        self._max_blocks = max_blocks
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens_by_hash)

    def __contains__(self, number: int) -> bool:
        return number in self._tokens_by_hash

    def match(self, key: PromptKey) -> int:
        """How many leading blocks of a prompt are believed to be there."""
        hashes, known = key.hashes, self._tokens_by_hash
        low, high = 0, len(hashes)
        if not high or hashes[0] not in known:
            return 0
        while low < high:  # a block is there only with all before it
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def note(self, key: PromptKey) -> None:
        """The replica computes, or has computed, this prompt."""
        known, hashes, sizes = self._tokens_by_hash, key.hashes, block_sizes()
        num_known = self.match(key)
        for block in range(len(hashes) - 1, num_known - 1, -1):
            if hashes[block] not in known:
                known[hashes[block]] = sizes[block]
                self.num_tokens += sizes[block]
        for block in range(num_known - 1, -1, -1):
            known.move_to_end(hashes[block])
        while len(known) > self._max_blocks or (
            self.capacity_tokens is not None and self.num_tokens > self.capacity_tokens
        ):
            self.num_tokens -= known.popitem(last=False)[1]

    def displaced(self, num_tokens: int) -> int:
        """How many of so many new tokens take the place of others."""
        if self.capacity_tokens is None:
            return 0
        return min(num_tokens, max(0, self.num_tokens + num_tokens - self.capacity_tokens))

    def forget(self) -> None:
        self._tokens_by_hash.clear()
        self.num_tokens = 0

    def check(self) -> None:
        """Raise AssertionError unless the bounds hold."""
        assert self.num_tokens == sum(self._tokens_by_hash.values())
        assert len(self._tokens_by_hash) <= self._max_blocks
        assert self.capacity_tokens is None or self.num_tokens <= self.capacity_tokens
