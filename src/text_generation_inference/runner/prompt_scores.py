"""Log-probabilities of prompt tokens, and of the best ids in their places.

Shared by the runners that score a prompt chunk by chunk.
"""

from typing import NamedTuple

from torch import Tensor

from text_generation_inference.types import PromptLogprobs


class PromptScores(NamedTuple):
    """Of some tokens of a prompt, on the device."""

    logprobs: Tensor  # [tokens]
    top_ids: Tensor | None = None  # [tokens, asked for]
    top_logprobs: Tensor | None = None  # the same


def score(scores: Tensor, targets: Tensor, num_top: int) -> PromptScores:
    """scores `[tokens, vocab]` float32, targets `[tokens]`: what came in each place."""
    totals = scores.logsumexp(dim=-1)
    logprobs = scores.gather(1, targets[:, None])[:, 0] - totals
    if not num_top:
        return PromptScores(logprobs)
    best = scores.topk(min(num_top, scores.shape[1]), dim=-1)
    return PromptScores(logprobs, best.indices, best.values - totals[:, None])


def read_scores(row: int, start: int, parts: list[PromptScores]) -> PromptLogprobs:
    """Parts that follow each other, as data. Waits for the device."""
    result = PromptLogprobs(row, start, [])
    for part in parts:
        result.logprobs.extend(part.logprobs.tolist())
        if part.top_ids is not None and part.top_logprobs is not None:
            result.top_ids.extend(part.top_ids.tolist())
            result.top_logprobs.extend(part.top_logprobs.tolist())
    return result
