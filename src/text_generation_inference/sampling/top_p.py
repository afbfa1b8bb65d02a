"""Top-p: an id stays if all ids that are more likely hold less than p together.

Ids exactly as likely as the last that stays have the same ones above them, so they stay too. The best always stays.
"""

import math

import torch
from torch import Tensor

from text_generation_inference.sampling.candidates import Candidates

NAME = "top_p"  # 1: off
SORTS = True


def apply(candidates: Candidates, p: Tensor) -> None:
    ascending = candidates.ascending
    # From the least up: what adds up to at most 1 - p leaves at least p above it.
    is_dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - p)[:, None]
    least_kept = ascending.masked_fill(is_dropped, math.inf).amin(dim=-1)
    floor = torch.minimum(least_kept, ascending[:, -1])
    candidates.drop_below(torch.where(p < 1, floor, -math.inf))
