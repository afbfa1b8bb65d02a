"""Top-n-sigma: ids whose score is within n standard deviations of the best one stay.

The deviation is that of all scores that are not dropped yet. It grows with the scores, so that the temperature makes no
difference to what stays.
"""

import math

import torch
from torch import Tensor

from text_generation_inference.sampling.candidates import Candidates

NAME = "top_n_sigma"  # 0: off
SORTS = False


def apply(candidates: Candidates, n: Tensor) -> None:
    scores = candidates.scores
    is_left = scores > -math.inf
    count = is_left.sum(dim=-1, keepdim=True)
    mean = torch.where(is_left, scores, 0.0).sum(dim=-1, keepdim=True) / count
    variance = torch.where(is_left, scores - mean, 0.0).square().sum(dim=-1, keepdim=True) / count
    floor = scores.amax(dim=-1) - n * variance[:, 0].sqrt()
    candidates.drop_below(torch.where(n > 0, floor, -math.inf))
