"""`HeadNorms`: root-mean-square norms of queries and keys before they are rotated, and their definition."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RmsNorm = Callable[[Tensor, Tensor, float], object]  # rows, weight, epsilon -> rows of the same shape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[..., width]`, normalised in float32, rounded to the weight's type and multiplied in it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(weight.dtype)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    q_weight: Tensor  # [head_dim]; of all heads together [heads * head_dim]
    k_weight: Tensor
    eps: float
    over_all: bool = False  # all heads of a token together, rather than each by itself

    def apply(self, q: Tensor, k: Tensor, norm: RmsNorm = rms_norm) -> tuple[Tensor, Tensor]:
        """q `[tokens, heads, head_dim]` and k, with a device's op `rms_norm` if it has one."""
        return self._normalise(q, self.q_weight, norm), self._normalise(k, self.k_weight, norm)

    def _normalise(self, x: Tensor, weight: Tensor, norm: RmsNorm) -> Tensor:
        rows = norm(x.flatten(1) if self.over_all else x.reshape(-1, x.shape[2]), weight, self.eps)
        assert isinstance(rows, Tensor)  # not quantised
        return rows.view(x.shape)
