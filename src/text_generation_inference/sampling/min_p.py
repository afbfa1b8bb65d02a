"""Min-p: ids less likely than a share of the likeliest are dropped."""

from torch import Tensor

from text_generation_inference.sampling.candidates import Candidates

NAME = "min_p"  # 0: off
SORTS = False


def apply(candidates: Candidates, share: Tensor) -> None:
    candidates.drop_below(candidates.scores.amax(dim=-1) + share.log())
