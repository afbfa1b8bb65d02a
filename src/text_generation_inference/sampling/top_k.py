"""Top-k: the k best ids stay, and those exactly as likely as the last of them."""

import math

import torch
from torch import Tensor

from text_generation_inference.sampling.candidates import Candidates

NAME = "top_k"  # 0: off
SORTS = True


def apply(candidates: Candidates, k: Tensor) -> None:
    count = candidates.scores.shape[1]
    is_limited = (k > 0) & (k < count)
    place = torch.where(is_limited, count - k, 0).long()
    kth = candidates.ascending.gather(1, place[:, None])[:, 0]
    candidates.drop_below(torch.where(is_limited, kth, -math.inf))
