"""Block tables of running requests: how they grow, what is given back, and which changes the next plan carries.

Where only a window of tokens is read, blocks behind it are given back whenever a request is looked at; while its prompt
is computed it gets as many ahead for them. Where some layers do that and others keep all, a request has two tables: it
goes on where there are blocks for both, and a member of the decode set has as many places in one as in the other.
"""

from text_generation_inference.scheduler.blocks import PADDING_BLOCK, BlockPool, WindowBlocks
from text_generation_inference.scheduler.decode_set import DecodeSet
from text_generation_inference.scheduler.request import Request

Growth = list[tuple[int, int, list[int]]]  # slot, place in its table, blocks


class BlockTables:
    def __init__(self, pool: BlockPool, decoding: DecodeSet) -> None:
        self._pool, self._beside, self._decoding = pool, pool.beside, decoding
        self._has_window = pool.window is not None
        self.gives_back = self._has_window or pool.beside is not None
        self._grow: Growth = []
        self._grow_beside: Growth = []

    def take_changes(self) -> tuple[Growth, Growth]:
        """Of both tables, for the plan that is made."""
        changes = self._grow, self._grow_beside
        self._grow, self._grow_beside = [], []
        return changes

    def room(self, request: Request) -> int:
        """Tokens that it has blocks for."""
        count = len(request.blocks)
        if self._beside is not None:
            count = min(count, len(request.beside))
        return count * self._pool.block_size

    @property
    def num_empty(self) -> int:
        """Blocks, of each kind, that hold nothing findable."""
        empty = self._pool.num_empty
        return empty if self._beside is None else min(empty, self._beside.num_empty)

    # -- growing ---------------------------------------------------------------------------------------------------

    def try_take(self, count: int) -> tuple[list[int], list[int]] | None:
        """So many blocks, and as many beside, where there are such; nothing, if there are fewer of either."""
        if self._beside is not None and not self._beside.has_room(count):
            return None
        blocks = self._pool.try_take(count)
        if blocks is None:
            return None
        return blocks, [] if self._beside is None else self._beside.try_take(count) or []

    def extend(self, request: Request, blocks: list[int], beside: list[int]) -> None:
        self._grow.append((request.slot, len(request.blocks), blocks))
        request.blocks += blocks
        if self._beside is not None:
            self._grow_beside.append((request.slot, len(request.beside), beside))
            request.beside += beside

    def move(self, request: Request, most_held: int, most_beside: int) -> bool:
        """Exchange blocks behind the next chunk of a prompt for as many ahead of it. False if it cannot go on."""
        if self._has_window:
            return self._move_window(request, most_held)
        return self._beside is None or self._move_beside(request, self._beside, most_beside)

    def _move_window(self, request: Request, most_held: int) -> bool:
        """Those that it shared are still others': there may be none in their place."""
        self.give_back_behind(request)
        start, size = len(request.blocks), self._pool.block_size
        count = min(most_held - len(request.held), -(-len(request.tokens) // size) - start)
        if self._pool.num_free < count:
            self.give_back_ahead()
        blocks = self._pool.try_take(min(count, self._pool.num_free))
        if blocks:
            self.extend(request, blocks, [])
        return bool(blocks) or request.reserved != start * size

    def _move_beside(self, request: Request, beside: WindowBlocks, most_beside: int) -> bool:
        """The same where blocks of all its known tokens are held, and only those beside are exchanged.

        A run that is computed at once needs all of its blocks.
        """
        self.give_back_behind(request)
        start, size = len(request.beside), self._pool.block_size
        count = min(most_beside - len(request.held_beside), -(-len(request.tokens) // size) - start)
        if beside.num_free < count:
            self.give_back_ahead()
        blocks = beside.try_take(max(0, min(count, beside.num_free)))
        if blocks:
            request.beside += blocks
            self._grow_beside.append((request.slot, start, blocks))
        at_once = next((end for first, end in request.whole_runs if first == request.reserved), request.reserved + 1)
        return len(request.beside) * size >= at_once

    # -- giving back -----------------------------------------------------------------------------------------------

    def give_back_behind(self, request: Request) -> bool:
        """Free the blocks that no coming step reads, which can then be found like those of a request that has ended.

        True if there were any.
        """
        confirmed = self._decoding.num_confirmed(request)
        if self._beside is not None:
            # Those of a prompt can be found already; behind what was generated nobody is likely to go on.
            first, end = request.num_beside_behind, self._beside.num_behind(confirmed)
            if end > first:
                self._beside.free(request.beside[first:end])
                request.beside[first:end] = [PADDING_BLOCK] * (end - first)
                request.num_beside_behind = end
            return end > first
        first, end = request.num_behind, self._pool.num_behind(confirmed)
        if end > first:
            self._pool.publish(request, confirmed)
            self._pool.free(request.blocks[first:end])
            request.blocks[first:end] = [PADDING_BLOCK] * (end - first)
            request.num_behind = end
        return end > first

    def give_back_ahead(self) -> bool:
        """Free the blocks that members of the decode set hold beyond their next token, and those behind their windows.
        True if there were any."""
        found = False
        decoding, size = self._decoding, self._pool.block_size
        for request in decoding.rows:
            if self.gives_back and self.give_back_behind(request):
                found = True
            reserved = decoding.num_reserved(request)
            num_needed = -(-decoding.num_needed(request, reserved) // size)
            if len(request.blocks) > num_needed:
                found = True
                self._pool.free(request.blocks[num_needed:])
                del request.blocks[num_needed:]
                if self._beside is not None:
                    self._beside.free(request.beside[num_needed:])
                    del request.beside[num_needed:]
                decoding.unschedule(request)
                decoding.schedule(request, reserved)
        return found

    def let_go(self, request: Request, forget: bool) -> None:
        """It stops running: what was computed stays findable, but for `forget`."""
        if not forget:
            self._pool.publish(request, request.computed)
        elif request.num_behind or request.num_beside_behind:
            self._pool.forget_behind(request)
        self._pool.break_promise(request.num_promised)
        self._pool.free(request.held, forget)
        if self._beside is not None:
            self._beside.free(request.held_beside, forget)
            self._grow_beside = [each for each in self._grow_beside if each[0] != request.slot]
        self._grow = [each for each in self._grow if each[0] != request.slot]
        request.forget_progress()

    def check(self, request: Request) -> None:
        """Raise AssertionError unless a running request has blocks for what it may have computed, and none behind."""
        reserved, size = self._decoding.num_reserved(request), self._pool.block_size
        assert not any(request.blocks[: request.num_behind]), "a block behind the window is in the table"
        assert len(request.blocks) * size >= reserved
        if self._beside is not None:
            assert not any(request.beside[: request.num_beside_behind]), "a block behind the window is in the table"
            assert len(request.beside) * size >= reserved
            assert len(request.beside) == len(request.blocks) or not request.decodes
