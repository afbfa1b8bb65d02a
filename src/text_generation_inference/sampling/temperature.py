"""Temperature: how flat the distribution is that log-probabilities, filters and draws see."""

from torch import Tensor

NAME = "temperature"


def apply(scores: Tensor, temperature: Tensor) -> Tensor:
    return scores / temperature[:, None]
