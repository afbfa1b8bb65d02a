"""When newcomers may join a running batch.

Pure arithmetic over the settings TGI's users know.

- `max_batch_prefill_tokens`: prompt tokens computed in one step, decode tokens of the same step counted in.
- `max_batch_total_tokens`: tokens the KV cache holds. A request is admitted when its known tokens fit; if the cache is
  full later, the newest request is preempted and recomputed.
- `max_batch_size`: requests running at a time.
- `max_step_ms`: how long a step may take where prompts are computed beside others' decode tokens (see `pace`).
- `waiting_served_ratio`, `max_waiting_tokens`: only where a step cannot mix prefill and decode (`Limits.mixes_phases`
  is false). There newcomers pause the running batch, so they wait until they are numerous enough or waited long enough.
  Where phases mix nobody is paused and both settings have no effect.
"""

import msgspec

_SMALLEST_STEP = 32  # tokens; a prompt is not cut into smaller parts for lack of memory
_MAX_FAILURES = 8
_STEPS_UNTIL_LARGER = 256


class BatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    max_batch_prefill_tokens: int
    max_batch_size: int
    max_total_tokens: int  # of one request, prompt and output
    mixes_phases: bool = True
    max_step_ms: int = 0  # 0: as long as it takes
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20

    def prefill_budget(self, num_decode: int) -> int:
        """Prompt tokens the next step may compute beside `num_decode` decode tokens."""
        if not self.mixes_phases:
            return self.max_batch_prefill_tokens
        return max(0, self.max_batch_prefill_tokens - num_decode)

    def min_newcomers(self, num_running: int, decode_steps_waited: int) -> int:
        """How many requests must be able to join at once, given `num_running` would pause for them."""
        if self.mixes_phases or num_running == 0 or decode_steps_waited >= self.max_waiting_tokens:
            return 1
        return max(1, int(num_running * self.waiting_served_ratio))


class StepLimit:
    """How large steps may be after one was too large for the device's memory: half of it, and later more again."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._most_rows = policy.max_batch_size
        self._most_tokens = max(policy.max_batch_size, policy.max_batch_prefill_tokens)
        self.rows, self.tokens = self._most_rows, self._most_tokens
        self._steps_left = 0  # until it grows
        self._tried_smallest = False
        self._failures = 0  # of the smallest step since there was a token

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
        if rows > 1:
            self.rows = rows // 2
        if tokens > rows:  # it computed prompts
            self.tokens = max(_SMALLEST_STEP, tokens // 2)
        self._steps_left = _STEPS_UNTIL_LARGER
        return True

    def on_step(self, gave_tokens: bool) -> None:
        """A step was computed."""
        self._tried_smallest = False
        if gave_tokens:
            self._failures = 0
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.rows = min(self._most_rows, 2 * self.rows)
                self.tokens = min(self._most_tokens, 2 * self.tokens)
                if (self.rows, self.tokens) != (self._most_rows, self._most_tokens):
                    self._steps_left = _STEPS_UNTIL_LARGER
