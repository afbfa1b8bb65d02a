"""Which waiting requests join the step that is being planned: two policies with one face.

Pure Python. By tokens: prompts may be cut, a step has a budget of tokens and of time, a request holds the blocks of its
known tokens (of a window's and a chunk's, where no more are read; both, where some layers keep all), cached prefixes
among them, and one to spare for each that runs. By shapes: the prompts of a step fit into shapes of the bucket plan,
cached prefixes and parts of prompts where it has shapes for those, and a request holds the blocks of its whole length.
The scheduler asks `open` once for each step and `try_join` for one request after the other, until one does not join.
"""

from collections.abc import Callable
from typing import Protocol

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.blocks import BlockPool, WindowBlocks
from text_generation_inference.scheduler.pace import StepPace, StepRoom
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.request import Request
from text_generation_inference.types import GenerationRequest


class PromptShapes(Protocol):
    """What prompts of a padded step can be."""

    @property
    def longest(self) -> int:
        """Tokens of a prompt, at most."""
        ...

    @property
    def in_parts(self) -> bool:
        """Whether a prompt may follow tokens that are in the cache; else prompts are computed whole."""
        ...

    def prompts_fit(self, rows: int, longest: int, context: int = 0, /) -> bool:
        """Whether so many, the longest of so many tokens after at most so many in the cache, can share a step."""
        ...


class _Admission:
    most_held = 0  # blocks of a request whose prompt is computed, where there is a window
    most_beside = 0  # the same of those beside others

    def __init__(self, policy: BatchPolicy, pool: BlockPool, pace: StepPace) -> None:
        self._policy, self._pool, self._pace = policy, pool, pace
        # Who did not fit, and what it found: until that changes it need not be looked up again.
        self._blocked: tuple[Request, int, int, int] | None = None

    def check(self, source: GenerationRequest) -> None:
        """Raise `ValidationError` if a request can never join."""

    def open(self, num_decode: int, most_tokens: int) -> StepRoom:
        """What the coming step, of at most `most_tokens`, has left for prompts beside `num_decode` rows."""
        raise NotImplementedError

    def try_join(self, request: Request, num_running: int) -> bool:
        """Hold blocks for a request if it can join the step."""
        if self._blocked == (request, *self._find_free(), num_running) or not self._fits(request):
            return False
        if self._try_hold(request, num_running):
            return True
        self._blocked = (request, *self._find_free(), num_running)
        return False

    def _find_free(self) -> tuple[int, int]:
        beside = self._pool.beside
        return self._pool.num_free, 0 if beside is None else beside.num_free

    def on_chunk(self, request: Request, start: int, end: int) -> None:
        """The step computes these tokens."""

    def forget(self) -> None:
        """The device has forgotten everything: everybody may try anew."""
        self._blocked = None

    def measure(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """Of a step of so many rows and tokens, what can be made smaller."""
        return num_rows, num_tokens

    def _fits(self, request: Request) -> bool:
        return True

    def _try_hold(self, request: Request, num_running: int) -> bool:
        raise NotImplementedError


class AdmissionByTokens(_Admission):
    def __init__(
        self,
        policy: BatchPolicy,
        pool: BlockPool,
        pace: StepPace,
        give_back: Callable[[], bool],  # blocks that others hold ahead of need; False if there are none
    ) -> None:
        super().__init__(policy, pool, pace)
        self._give_back = give_back
        if pool.window is not None:
            # The window before a chunk and the chunk, which is not to take all that other windows could have. Blocks
            # that chunks leave behind are exchanged for blocks ahead, so that prompts of any length get on.
            chunk = -(-policy.max_batch_prefill_tokens // pool.block_size) + 1
            self.most_held = pool.window_blocks + max(1, min(chunk, (pool.num_usable - pool.window_blocks) // 2))
        if pool.beside is not None:
            chunk = -(-policy.max_batch_prefill_tokens // pool.block_size) + 1
            self.most_beside = min(pool.beside.window_blocks + chunk, pool.beside.num_usable)

    def open(self, num_decode: int, most_tokens: int) -> StepRoom:
        budget = min(self._policy.prefill_budget(num_decode), max(0, most_tokens - num_decode))
        return self._pace.room(num_decode, budget)

    def _try_hold(self, request: Request, num_running: int) -> bool:
        """Blocks for all known tokens, shared ones first."""
        size, known = self._pool.block_size, len(request.tokens)
        if self._pool.beside is not None:
            return self._try_hold_both(request, num_running, self._pool.beside)
        shared = _match(self._pool, request)
        num_new = -(-known // size) - len(shared)
        behind = 0
        if self._pool.window is not None:
            behind = self._pool.num_behind(len(shared) * size)
            num_new = min(num_new, self.most_held - (len(shared) - behind))
        while (blocks := self._pool.try_take(num_new, shared[behind:], num_spare=num_running)) is None:
            if not self._give_back():
                return False
        request.blocks = shared[:behind] + blocks
        request.num_behind = behind
        request.reserved = len(shared) * size
        return True

    def _try_hold_both(self, request: Request, num_running: int, beside: WindowBlocks) -> bool:
        """The same in both pools; beside, of a window and a chunk."""
        pool, size = self._pool, self._pool.block_size
        shared, shared_beside = _match_both(pool, request)
        behind = beside.num_behind(len(shared) * size)
        seen = shared_beside[behind:]
        num_new = -(-len(request.tokens) // size) - len(shared)
        num_beside = min(num_new, self.most_beside - len(seen))
        while not (pool.has_room(num_new, shared, num_running) and beside.has_room(num_beside, seen, num_running)):
            if not self._give_back():
                return False
        request.blocks = pool.try_take(num_new, shared) or []
        request.beside = shared_beside[:behind] + (beside.try_take(num_beside, seen) or [])
        request.num_beside_behind = behind
        request.reserved = len(shared) * size
        return True


class _ShapeRoom(StepRoom):
    """What the step being planned has left where all its prompts have shapes."""

    def __init__(self, shapes: PromptShapes, most: int, block_size: int, by_time: StepRoom) -> None:
        self._shapes, self._most, self._size, self._by_time = shapes, most, block_size, by_time
        self._count = self._longest = self._context = 0  # prompts, tokens of the longest, and before any

    @property
    def is_open(self) -> bool:
        return True  # what fits is looked up with each

    @property
    def is_untouched(self) -> bool:
        return not self._count

    @property
    def seconds_left(self) -> float:
        return self._by_time.seconds_left

    def keep_back(self, share: float) -> None:
        self._by_time.keep_back(share)

    def reach(self, start: int, known: int, timed: bool = True) -> int:
        """`start`: it does not fit beside the others. A first one always does."""
        count = known - start
        if self._shapes.in_parts:
            count = min(count, self._most)
            affordable = self._by_time.reach(start, known) - start
            if timed and affordable < count:
                # Rounded down to what shapes are likely to have, so that little of the time goes to padding.
                count = min(count, self._size << max(0, (affordable // self._size).bit_length() - 1))
        longest, context = max(self._longest, count), max(self._context, start)
        fits = not self._count or self._shapes.prompts_fit(self._count + 1, longest, context)
        return start + count if fits else start

    def spend(self, start: int, end: int) -> None:
        self._count += 1
        self._longest, self._context = max(self._longest, end - start), max(self._context, start)
        self._by_time.spend(start, end)


class AdmissionByShapes(_Admission):
    """Nobody is preempted, to come back with a longer prompt than any shape is made for. Only after a lack of memory
    this happens; such a prompt is computed alone."""

    def __init__(self, policy: BatchPolicy, pool: BlockPool, pace: StepPace, shapes: PromptShapes) -> None:
        super().__init__(policy, pool, pace)
        self._shapes = shapes
        self._shared: list[int] = []  # blocks that the request being looked at finds in the cache
        self._fresh: set[int] = set()  # blocks that this step fills: its passes come in any order
        self._room = self.open(0, 0)

    def check(self, source: GenerationRequest) -> None:
        if len(source.token_ids) > self._shapes.longest:
            raise ValidationError(
                f"`inputs` must have at most `max_input_tokens` tokens. Given: {len(source.token_ids)}"
            )

    def open(self, num_decode: int, most_tokens: int) -> StepRoom:
        self._fresh.clear()
        most = self._policy.max_batch_prefill_tokens
        by_time = self._pace.room(num_decode, most)
        self._room = _ShapeRoom(self._shapes, most, self._pool.block_size, by_time)
        return self._room

    def on_chunk(self, request: Request, start: int, end: int) -> None:
        size = self._pool.block_size
        self._fresh.update(request.blocks[start // size : end // size])

    def measure(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """Fewer prompts are all that makes a step smaller."""
        return num_rows, num_rows

    def _fits(self, request: Request) -> bool:
        self._shared = _match(self._pool, request) if self._shapes.in_parts else []
        if not self._fresh.isdisjoint(self._shared):
            return False  # in the next step it finds them computed
        start = len(self._shared) * self._pool.block_size
        return self._room.reach(start, len(request.tokens), not request.wants_prompt_logprobs) > start

    def _try_hold(self, request: Request, num_running: int) -> bool:
        """Blocks for all known tokens, shared ones first, and the promise of those for all that it may compute (its
        last one is not): who would lay hands on them now would part the blocks of others that are in use."""
        shared, size = self._shared, self._pool.block_size
        num_known = -(-len(request.tokens) // size)
        later = max(0, -(-(request.total_limit - 1) // size) - num_known)
        blocks = self._pool.try_take(num_known - len(shared), shared, num_later=later)
        if blocks is None:
            return False
        request.blocks, request.num_promised = blocks, later
        request.reserved = len(shared) * size
        return True


def _without_cuts(request: Request, num_blocks: int, size: int) -> int:
    """As many blocks as do not end within a run that is computed at once. Before one they may end within another."""
    for start, end in reversed(request.whole_runs):
        if start < num_blocks * size < end:
            num_blocks = start // size
    return num_blocks


def _match(pool: BlockPool, request: Request) -> list[int]:
    """Blocks of the longest prefix that is in the cache and may be taken from it; the last token is always computed."""
    if request.wants_prompt_logprobs:
        return []
    shared = pool.match(request.tokens[: len(request.tokens) - 1], request.root)
    return shared[: _without_cuts(request, len(shared), pool.block_size)]


def _match_both(pool: BlockPool, request: Request) -> tuple[list[int], list[int]]:
    """The same where a prefix has blocks in two pools: what is cut off may leave one whose window is not there."""
    if request.wants_prompt_logprobs:
        return [], []

    def may_end(num_blocks: int) -> bool:
        return _without_cuts(request, num_blocks, pool.block_size) == num_blocks

    return pool.match_both(
        request.tokens[: len(request.tokens) - 1], request.root, may_end if request.whole_runs else None
    )
