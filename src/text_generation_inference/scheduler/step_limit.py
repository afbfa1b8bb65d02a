"""How large steps may be after one was too large for the device's memory.

Pure Python. What failed is halved at once; then each step that fits allows twice its own size, so that the
limit is back within a few steps. A size that failed is remembered: steps stay below it for some steps, then it is tried
once more. Each time it fails again the wait doubles, so that a lack that stays costs few failures and one that has
passed costs little time.
"""

from text_generation_inference.scheduler.policy import BatchPolicy

_SMALLEST_STEP = 32  # tokens; a prompt is not cut into smaller parts for lack of memory
_MAX_FAILURES = 8
_FIRST_WAIT, _LONGEST_WAIT = 8, 4096  # steps until a size that failed is tried again


class _Limit:
    """Of one dimension of a step."""

    __slots__ = ("_failed", "_left", "_most", "_wait", "size")

    def __init__(self, most: int) -> None:
        self._most = self.size = most
        self._failed = 0  # the smallest size that failed and was not computed since; 0: none
        self._left = 0  # steps until it is tried again
        self._wait = 0  # how many there were before the last try

    @property
    def is_full(self) -> bool:
        return self.size == self._most and not self._failed

    @property
    def is_below_failure(self) -> bool:
        return bool(self._failed)

    @property
    def _below(self) -> int:
        return self._failed - max(1, self._failed // 4)

    def on_failure(self, size: int, least: int, blamed: bool) -> None:
        """A step of this size did not fit; `blamed`: for this dimension, as far as one can tell."""
        self.size = min(self._most, max(least, size // 2))
        if not blamed:
            return
        tried_again = self._failed and not self._left and size > self._below
        self._wait = min(2 * self._wait, _LONGEST_WAIT) if tried_again else _FIRST_WAIT
        self._failed = min(size, self._failed) if self._failed else size
        self._left = self._wait

    def on_step(self, size: int) -> None:
        """A step of this size was computed."""
        allowed = min(self._most, 2 * size)
        if size >= self._failed:
            self._failed = 0
        else:
            self._left = max(0, self._left - 1)
            allowed = min(allowed, self._below if self._left else self._failed)
        self.size = max(self.size, allowed)


class StepLimit:
    def __init__(self, policy: BatchPolicy) -> None:
        self._rows = _Limit(policy.max_batch_size)
        self._tokens = _Limit(max(policy.max_batch_size, policy.max_batch_prefill_tokens))
        self._is_full = True  # most of the time
        self._tried_smallest = False
        self._failures = 0  # of the smallest step since there was a token

    @property
    def rows(self) -> int:
        return self._rows.size

    @property
    def tokens(self) -> int:
        return self._tokens.size

    def shrink(self, rows: int, tokens: int) -> bool:
        """A step of so many requests and tokens did not fit. False if none is smaller, and it was tried often enough.

        That is twice in a row, or a number of times without a token: a prompt may fit in parts, and its logits not.
        """
        if rows <= 1 and tokens <= _SMALLEST_STEP:
            self._failures += 1
            give_up = self._tried_smallest or self._failures >= _MAX_FAILURES
            self._tried_smallest = not give_up
            if give_up:
                self._failures = 0
            return not give_up
        self._is_full = False
        has_prompts = tokens > rows
        # Prompts take most of a step. Where one with fewer of their tokens fails as well, it may be for its requests.
        if rows > 1:
            self._rows.on_failure(rows, 1, not has_prompts or self._tokens.is_below_failure)
        if has_prompts:
            self._tokens.on_failure(tokens, _SMALLEST_STEP, True)
        return True

    def on_step(self, rows: int, tokens: int, gave_tokens: bool) -> None:
        """A step of so many requests and tokens was computed."""
        self._tried_smallest = False
        if gave_tokens:
            self._failures = 0
        if self._is_full:
            return
        self._rows.on_step(rows)
        self._tokens.on_step(tokens)
        self._is_full = self._rows.is_full and self._tokens.is_full
