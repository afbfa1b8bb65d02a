"""When newcomers may join a running batch.

Pure arithmetic over the settings TGI's users know.

- `max_batch_prefill_tokens`: prompt tokens computed in one step, decode tokens of the same step counted in.
- `max_batch_total_tokens`: tokens the KV cache holds. A request is admitted when its known tokens fit; if the cache is
  full later, the newest request is preempted and recomputed.
- `max_batch_size`: requests running at a time.
- `max_step_ms`: how long a step may take where prompts are computed beside others' decode tokens (see `pace`).
"""

import msgspec


class BatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    max_batch_prefill_tokens: int
    max_batch_size: int
    max_total_tokens: int  # of one request, prompt and output
    max_step_ms: int = 0  # 0: as long as it takes
    tokens_per_row: int = 1  # of a decode step: each row yields this one, or 0 to so many

    def prefill_budget(self, num_decode: int) -> int:
        """Prompt tokens the next step may compute beside `num_decode` decode tokens."""
        return max(0, self.max_batch_prefill_tokens - num_decode * self.tokens_per_row)
