"""The books of the KV cache: who holds which block, which blocks are free, which can be found again.

Five calls: `match` reads, `take` and `free` change (`take_promised`: what `take` has kept for later), `publish` makes a
request's full blocks findable (`forget` undoes that for all), `check` proves that the books balance. Block 0 belongs to
nobody: padding writes go there. The tensors live on the device; this module knows numbers only.

Where all layers read a window of tokens only, a request gives the blocks behind it back while it runs: they stand as
block 0 in its table, which nobody reads. Where some layers do and others keep all, those have blocks of their own
(`WindowBlocks`, the pool's `beside`), and requests a second table: what is behind the window is given back there alone.
"""

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

from text_generation_inference.config import least_blocks
from text_generation_inference.scheduler.prefix import BesideIndex, PrefixIndex, PrefixRoot, WindowPrefixIndex
from text_generation_inference.scheduler.request import Request

PADDING_BLOCK = 0
_PLAIN_ROOT = PrefixRoot()


class BlockBooks:
    """Which blocks are held, and by how many; which are free, and hold something that can be found."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int | None,  # a token reads itself and the `window - 1` tokens before it; None: all before it
        index: PrefixIndex | WindowPrefixIndex | BesideIndex,
        lowest_first: bool = False,  # of empty blocks: those in use stay among the first of the cache
    ) -> None:
        assert num_blocks >= 2 and block_size >= 1 and (window is None or window >= 1)
        self.lowest_first = lowest_first
        self.window = window
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        # Free and not published; taken from the end, or the lowest first (then a heap).
        self._empty = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        if lowest_first:
            self._empty.reverse()
        self._cached: OrderedDict[int, None] = OrderedDict()  # free but published; least recently used first
        self.num_promised = 0  # free blocks that nobody may take but those to whom they were promised
        self._index = index

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached) - self.num_promised

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_empty(self) -> int:
        """Free blocks that hold nothing findable."""
        return len(self._empty)

    @property
    def window_blocks(self) -> int:
        """Blocks that the tokens before the first one of a block may be read from."""
        assert self.window is not None
        return -(-(self.window - 1) // self.block_size)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that there is room for."""
        if self.window is not None and self.num_usable >= least_blocks(self.window, self.block_size):
            return sys.maxsize
        return self.num_usable * self.block_size

    def num_behind(self, num_computed: int) -> int:
        """Leading blocks that nothing reads once so many tokens are computed."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size

    def has_room(self, num_new: int, shared: Sequence[int] = (), num_spare: int = 0) -> bool:
        """Whether `try_take` would take."""
        shared_free = sum(1 for block in shared if not self._holders[block])
        return self.num_free - shared_free >= num_new + num_spare

    def try_take(
        self, num_new: int, shared: Sequence[int] = (), num_spare: int = 0, num_later: int = 0
    ) -> list[int] | None:
        """Hold `shared` (from `match`) and `num_new` other blocks; `num_later` more are promised.

        None, with nothing changed, if fewer than `num_spare` blocks would then be free.
        """
        if not self.has_room(num_new, shared, num_spare + num_later):
            return None
        self.num_promised += num_later
        for block in shared:
            if not self._holders[block]:
                del self._cached[block]
            self._holders[block] += 1
        if num_new <= len(self._empty) and not self.lowest_first:
            first = len(self._empty) - num_new
            taken = self._empty[first:]
            del self._empty[first:]
            for block in taken:
                self._holders[block] = 1
            return [*shared, *taken]
        return [*shared, *(self._take_one() for _ in range(num_new))]

    def take_promised(self, count: int) -> list[int]:
        self.break_promise(count)
        return [self._take_one() for _ in range(count)]

    def break_promise(self, count: int) -> None:
        """So many of the promised blocks are anybody's."""
        assert 0 <= count <= self.num_promised
        self.num_promised -= count

    def _take_one(self) -> int:
        if self._empty:
            block = heappop(self._empty) if self.lowest_first else self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
        self._holders[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        self._index.remove(block)

    def free(self, blocks: Sequence[int], forget: bool = False) -> None:
        """Give blocks back. The last ones become evictable first, since a prefix is useful to more requests.

        With `forget` their content is not trusted and cannot be found again.
        """
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is freed but nobody holds it"
            self._holders[block] -= 1
            if forget and block in self._index:
                self._unpublish(block)
            if not self._holders[block]:
                if block in self._index:
                    self._cached[block] = None
                else:
                    self._put_empty(block)

    def _put_empty(self, block: int) -> None:
        if self.lowest_first:
            heappush(self._empty, block)
        else:
            self._empty.append(block)

    def _forget_one(self, block: int) -> None:
        """It cannot be found again, whoever holds it."""
        self._index.remove(block)
        if not self._holders[block]:
            del self._cached[block]
            self._put_empty(block)

    def _empty_cached(self) -> None:
        """Nothing is published any more."""
        self._empty += reversed(self._cached)
        if self.lowest_first:
            heapify(self._empty)
        self._cached.clear()

    def verify(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is exactly one of padding, empty, cached or held as `held` says."""
        held_count = Counter(block for blocks in held for block in blocks)
        empty, cached = set(self._empty), set(self._cached)
        assert 0 <= self.num_promised <= len(empty) + len(cached), "more is promised than there is"
        assert len(empty) == len(self._empty), "a block is on the empty list twice"
        assert PADDING_BLOCK not in empty | cached | held_count.keys(), "the padding block is in use"
        for block in range(1, self.num_blocks):
            assert self._holders[block] == held_count[block], (
                f"block {block} counts {self._holders[block]} holders, {held_count[block]} hold it"
            )
            places = (block in empty) + (block in cached) + (held_count[block] > 0)
            assert places == 1, f"block {block} is in {places} places"
            assert not (block in empty and block in self._index), f"empty block {block} is published"
            assert block not in cached or block in self._index, f"cached block {block} is not published"
        self._index.check(self.block_size)


class WindowBlocks(BlockBooks):
    """Blocks of the layers that read a window of tokens, beside a pool for those that keep all.

    A full one is found by the identity of the pool's block for the same tokens: both are there, or it is not found.
    """

    _index: BesideIndex

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size, window, BesideIndex())

    @property
    def identities(self) -> set[int]:
        """Beside which one can be found."""
        return self._index.identities

    def find(self, identity: int) -> int:
        """The block beside the one of this identity; 0: none."""
        return self._index.find(identity)

    def publish(self, identity: int, block: int) -> None:
        """Make a held block findable, unless there is one already, or it is known by another name."""
        if not self._index.find(identity) and block not in self._index:
            self._index.insert(identity, block)

    def drop(self, identity: int) -> None:
        """The pool's block is gone, or what is beside it is not trusted."""
        block = self._index.find(identity)
        if block:
            self._forget_one(block)

    def forget(self) -> None:
        self._index = BesideIndex()
        self._empty_cached()


class BlockPool(BlockBooks):
    _index: PrefixIndex | WindowPrefixIndex

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        window: int | None = None,
        beside: WindowBlocks | None = None,  # of layers that read a window, where this pool's keep all
        lowest_first: bool = False,
    ) -> None:
        assert beside is None or (window is None and beside.block_size == block_size)
        index = PrefixIndex() if window is None else WindowPrefixIndex()
        super().__init__(num_blocks, block_size, window, index, lowest_first)
        self.prefix_caching = prefix_caching
        self.beside = beside

    @property
    def longest(self) -> int:
        """Tokens of the longest request that there is room for."""
        own = super().longest
        return own if self.beside is None else min(own, self.beside.longest)

    @property
    def num_free_of_all(self) -> int:
        """Free blocks; where there are others beside, as many as say how much is left of what there is least of."""
        if self.beside is None:
            return self.num_free
        return min(self.num_free, self.beside.num_free * self.num_usable // self.beside.num_usable)

    def match(self, tokens: Sequence[int], root: PrefixRoot = _PLAIN_ROOT) -> list[int]:
        """The published blocks that hold the longest whole-block prefix of `tokens`; 0 for those behind its window."""
        blocks = self._walk(tokens, root)
        if self.window is None:
            return blocks
        return self._with_window(self, blocks, None)

    def match_both(
        self, tokens: Sequence[int], root: PrefixRoot = _PLAIN_ROOT, may_end: Callable[[int], bool] | None = None
    ) -> tuple[list[int], list[int]]:
        """The same with blocks beside: those of the longest prefix, of a number of blocks that `may_end`, that is all
        here and whose window is there; then, as many, those there."""
        assert self.beside is not None
        hits = self._find_all(tokens, root)
        beside = [self.beside.find(identity) for _, identity in hits]
        found = self._with_window(self.beside, beside, may_end)
        return [block for block, _ in hits[: len(found)]], found

    @staticmethod
    def _with_window(books: BlockBooks, blocks: list[int], may_end: Callable[[int], bool] | None) -> list[int]:
        """Of blocks, 0 where one is gone, those of the longest prefix whose window is there; 0 for those behind it."""
        longest = run = 0  # blocks of that prefix; blocks that are there up to here
        for number, block in enumerate(blocks, 1):
            run = run + 1 if block else 0
            if run >= number - books.num_behind(number * books.block_size) and (may_end is None or may_end(number)):
                longest = number
        behind = books.num_behind(longest * books.block_size)
        return [PADDING_BLOCK] * behind + blocks[behind:longest]

    def _walk(self, tokens: Sequence[int], root: PrefixRoot) -> list[int]:
        """The blocks of the longest prefix that is known; 0 where one is gone."""
        return [block for block, _ in self._find_all(tokens, root)]

    def _find_all(self, tokens: Sequence[int], root: PrefixRoot) -> list[tuple[int, int]]:
        """Blocks and identities of the longest prefix that is known."""
        hits: list[tuple[int, int]] = []
        if not self.prefix_caching:
            return hits
        parent: object = root
        size = self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            hit = self._index.find(parent, tuple(tokens[start : start + size]))
            if hit is None:
                break
            parent = hit[1]
            hits.append(hit)
        return hits

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the request's blocks that lie wholly within its first `num_tokens` tokens findable."""
        if not self.prefix_caching:
            return
        size, beside = self.block_size, self.beside
        for number in range(request.num_published, num_tokens // size):
            tokens = tuple(request.tokens[number * size : (number + 1) * size])
            hit = self._index.find(request.chain, tokens)
            block = request.blocks[number]
            if hit is not None and (hit[0] or not block):
                identity = hit[1]
            elif block:
                identity = self._index.insert(request.chain, tokens, block)
            else:  # forgotten since it was given back: what follows cannot be found
                request.num_published = sys.maxsize
                return
            request.chain = identity
            request.num_published = number + 1
            if beside is not None and (block := request.beside[number]):
                beside.publish(identity, block)

    def _unpublish(self, block: int) -> None:
        identity = self._index.remove(block)
        if self.beside is not None:
            self.beside.drop(identity)

    def forget_behind(self, request: Request) -> None:
        """What a request has given back while it ran cannot be found again: it is not trusted."""
        if self.beside is not None:
            for _, identity in self._find_all(
                request.tokens[: request.num_beside_behind * self.block_size], request.root
            ):
                self.beside.drop(identity)
        for block in self._walk(request.tokens[: request.num_behind * self.block_size], request.root):
            if block:
                self._forget_one(block)

    def forget(self) -> None:
        """No block can be found again: what they hold is not trusted."""
        self._index = PrefixIndex() if self.window is None else WindowPrefixIndex()
        self._empty_cached()
        if self.beside is not None:
            self.beside.forget()

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the books say who holds what, as the requests that run do."""
        requests = list(requests)
        self.verify(request.held for request in requests)
        if self.beside is not None:
            self.beside.verify(request.held_beside for request in requests)
            assert self.beside.identities <= self._index.identities, "a block beside one that is gone can be found"
