"""The feed-forward part of a mixture of experts on Gaudi: one op for all experts of a rank."""

from collections.abc import Sequence

import torch
from torch import Tensor


def experts(
    x: Tensor,  # [tokens, hidden]
    chosen: Tensor,  # [tokens, k] int64: experts of each token, counted over all ranks
    shares: Tensor,  # [tokens, k]: how much of each
    gate_up: Sequence[Tensor],  # of each expert here [2 * width, hidden]
    down: Sequence[Tensor],  # of each expert here [hidden, width]
    first: int = 0,  # number of the first expert here
    activation: str = "silu",
    per_call: int = -1,  # at most so many experts in one call, which older software needs; -1: all
) -> Tensor:
    """-> `[tokens, hidden]`: the sum over the experts that are here."""
    step = len(gate_up) if per_call < 1 else per_call
    out: Tensor | None = None
    for start in range(0, len(gate_up), step):
        end = min(start + step, len(gate_up))
        part = torch.ops.hpu.mixture_of_experts(
            x,
            chosen,
            shares.to(x.dtype),
            list(gate_up[start:end]),
            list(down[start:end]),
            True,  # weights are [out, in]
            activation,
            first + start,
            first + end - 1,
        )
        out = part if out is None else out + part
    assert out is not None
    return out
