"""The feed-forward part of a mixture of experts on Gaudi: one op for all experts of a rank."""

import torch
from torch import Tensor

from text_generation_inference.kernels import experts as reference
from text_generation_inference.kernels.fp8 import Fp8Weight, dequantize_weight
from text_generation_inference.kernels.matrices import Weight


def experts(
    x: Tensor,  # [tokens, hidden]
    ids: Tensor,  # [tokens, k]
    weights: Tensor,  # [tokens, k] float32
    gate_up: Weight,  # [experts * 2 * width, hidden]
    down: Weight,  # [experts * hidden, width]
    gate: str = "silu",
    biases: tuple[Tensor, Tensor] | None = None,
    scale_inputs: bool = False,
    per_call: int = -1,  # at most so many experts in one call, which older software needs; -1: all
) -> Tensor:
    """See `kernels.experts`, which does what the card's op does not: other gates, biases, scaled inputs, few bits.

    Matrices in FP8 are widened for each pass, and what goes into them is not rounded: that is more precise, and needs
    more memory for a while.
    """
    gate_up, down = (_widen(weight, x.dtype) for weight in (gate_up, down))
    is_known = gate == "silu" and biases is None and not scale_inputs
    if not is_known or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return reference.experts(x, ids, weights, gate_up, down, gate, biases, scale_inputs)
    count = down.shape[0] // x.shape[1]
    first, second = list(gate_up.chunk(count)), list(down.chunk(count))
    step = count if per_call < 1 else per_call
    out: Tensor | None = None
    for start in range(0, count, step):
        end = min(start + step, count)
        part = torch.ops.hpu.mixture_of_experts(
            x,
            ids,
            weights.to(x.dtype),
            first[start:end],
            second[start:end],
            True,  # weights are [out, in]
            gate,
            start,
            end - 1,
        )
        out = part if out is None else out + part
    assert out is not None
    return out


def _widen(weight: Weight, dtype: torch.dtype) -> Weight:
    return dequantize_weight(weight).to(dtype) if isinstance(weight, Fp8Weight) else weight
