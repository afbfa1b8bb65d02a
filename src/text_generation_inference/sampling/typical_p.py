"""Typical-p: the ids whose information is closest to the entropy stay, until they hold the mass.

Those as close as the last of them stay too.
"""

import torch
from torch import Tensor

from text_generation_inference.sampling.candidates import Candidates

NAME = "typical_p"  # 1: off
SORTS = True


def apply(candidates: Candidates, mass: Tensor) -> None:
    logprobs = candidates.scores.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.nansum(logprobs * probabilities, dim=-1, keepdim=True)
    surprise = (-logprobs - entropy).abs()
    ordered, order = surprise.sort(dim=-1)
    cumulated = probabilities.gather(1, order).cumsum(dim=-1)
    last = (cumulated < mass[:, None]).sum(dim=-1).clamp(max=ordered.shape[1] - 1)
    threshold = ordered.gather(1, last[:, None])
    candidates.drop((surprise > threshold) & (mass < 1)[:, None])
