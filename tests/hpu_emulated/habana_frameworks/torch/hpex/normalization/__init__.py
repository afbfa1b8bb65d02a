"""Fused normalisation. Autograd functions take their arguments by position."""

import torch
from torch import Tensor


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, data_in: Tensor, gamma: Tensor, eps: float, use_stages: bool = True, bwd_mode: int = 0, fast_math: bool = False) -> Tensor:  # fmt: skip
        if data_in.dtype is not gamma.dtype:
            raise AssertionError(f"FusedRMSNorm: input {data_in.dtype} and weight {gamma.dtype} differ in type")
        if data_in.dim() != 3:
            raise AssertionError(f"FusedRMSNorm: input of {data_in.dim()} dimensions, callers give 3")
        op = torch.ops.hpu.rms_norm_fast if fast_math else torch.ops.hpu.rms_norm
        return op(data_in, gamma, eps)[0]
