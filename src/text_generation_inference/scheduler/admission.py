"""Which waiting requests join the step that is being planned: two policies with one face.

Pure Python. By tokens: prompts may be cut, a step has a budget of tokens and of time, a request holds the blocks of its
known tokens (of a window's and a chunk's, where no more are read), cached prefixes among them, and one to spare for
each that runs. By shapes: prompts are computed whole, a
step has a shape of the bucket plan, a request holds the blocks of its whole length. The scheduler asks `open` once for
each step and `try_join` for one request after the other, until one does not join.
"""

from collections.abc import Callable

from text_generation_inference.errors import ValidationError
from text_generation_inference.scheduler.blocks import BlockPool
from text_generation_inference.scheduler.pace import StepPace, StepRoom
from text_generation_inference.scheduler.policy import BatchPolicy
from text_generation_inference.scheduler.request import Request
from text_generation_inference.types import GenerationRequest

# Whether so many prompts, padded to the longest of so many tokens, have a shape that a step can have.
PromptsFit = Callable[[int, int], bool]


class _Admission:
    most_held = 0  # blocks of a request whose prompt is computed, where there is a window

    def __init__(self, policy: BatchPolicy, pool: BlockPool, pace: StepPace) -> None:
        self._policy, self._pool, self._pace = policy, pool, pace
        # Who did not fit, and what it found: until that changes it need not be looked up again.
        self._blocked: tuple[Request, int, int] | None = None

    def check(self, source: GenerationRequest) -> None:
        """Raise `ValidationError` if a request can never join."""

    def open(self, num_decode: int, most_tokens: int) -> StepRoom:
        """What the coming step, of at most `most_tokens`, has left for prompts beside `num_decode` rows."""
        raise NotImplementedError

    def try_join(self, request: Request, num_running: int) -> bool:
        """Hold blocks for a request if it can join the step."""
        if not self._fits(request) or self._blocked == (request, self._pool.num_free, num_running):
            return False
        if self._try_hold(request, num_running):
            return True
        self._blocked = (request, self._pool.num_free, num_running)
        return False

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

    def open(self, num_decode: int, most_tokens: int) -> StepRoom:
        budget = min(self._policy.prefill_budget(num_decode), max(0, most_tokens - num_decode))
        return self._pace.room(num_decode, budget)

    def _try_hold(self, request: Request, num_running: int) -> bool:
        """Blocks for all known tokens, shared ones first."""
        size, known = self._pool.block_size, len(request.tokens)
        shared: list[int] = []
        if not request.wants_prompt_logprobs:
            shared = self._pool.match(request.tokens[: known - 1], request.root)
            shared = shared[: _without_cuts(request, len(shared), size)]
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


class AdmissionByShapes(_Admission):
    """Nobody is preempted, to come back with a longer prompt than any shape is made for. Only after a lack of memory
    this happens; such a prompt is computed alone."""

    def __init__(self, policy: BatchPolicy, pool: BlockPool, pace: StepPace, prompts_fit: PromptsFit) -> None:
        super().__init__(policy, pool, pace)
        self._prompts_fit = prompts_fit
        self._count = self._longest = 0  # prompts of the step, and tokens of the longest
        self._room = self.open(0, 0)

    def check(self, source: GenerationRequest) -> None:
        if not self._prompts_fit(1, len(source.token_ids)):
            raise ValidationError(
                f"`inputs` must have at most `max_input_tokens` tokens. Given: {len(source.token_ids)}"
            )

    def open(self, num_decode: int, most_tokens: int) -> StepRoom:
        self._count = self._longest = 0
        self._room = self._pace.room(0, self._policy.max_batch_prefill_tokens)  # what fits is looked up with each
        return self._room

    def measure(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """Fewer prompts are all that makes a step smaller."""
        return num_rows, num_rows

    def _fits(self, request: Request) -> bool:
        longest = max(self._longest, len(request.tokens))
        return not self._count or self._prompts_fit(self._count + 1, longest)  # one alone has been looked up

    def _try_hold(self, request: Request, num_running: int) -> bool:
        """Blocks for all tokens that the request may compute: its last one is not."""
        blocks = self._pool.try_take(-(-(request.total_limit - 1) // self._pool.block_size))
        if blocks is None:
            return False
        request.blocks = blocks
        self._count, self._longest = self._count + 1, max(self._longest, len(request.tokens))
        self._room.tokens = max(self._room.tokens, len(request.tokens))
        return True


def _without_cuts(request: Request, num_blocks: int, size: int) -> int:
    """As many blocks as do not end within a run that is computed at once. Before one they may end within another."""
    for start, end in reversed(request.whole_runs):
        if start < num_blocks * size < end:
            num_blocks = start // size
    return num_blocks
