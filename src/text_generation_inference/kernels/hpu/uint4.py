"""Products with matrices of 4 bits on Gaudi: the card keeps codes, and its op widens them for each product.

The op has a scale and a whole zero point for each group, and scales in the type of the rows. What it does not take is
widened when it is packed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.low_bit import LowBitWeight, unpack_codes
from text_generation_inference.kernels.matrices import PackedWeight, Rows, Weight
from text_generation_inference.kernels.ops import LinearOp

KINDS = frozenset(("4 bits",))
_PER_WORD, _MOST = 8, 15  # codes of an int32; the largest of them


def has_uint4() -> bool:
    """Whether the software has the op."""
    return hasattr(torch.ops.hpu, "convert_from_uint4")


@dataclass(slots=True)
class Uint4Weight(PackedWeight):
    codes: Tensor  # int32 [columns, out / 8], the lowest bits first
    scale: Tensor  # [groups, out]
    zeros: Tensor  # int32 [groups, out / 8]
    order: Tensor | None  # int32 [columns]: the input of each
    shape: torch.Size


class Uint4Ops:
    def __init__(self, linear: LinearOp) -> None:
        self._linear = linear  # of all other matrices
        self._ops: Any = torch.ops.hpu

    def pack_low_bit(self, weight: LowBitWeight, num_experts: int | None = None) -> Weight:
        zeros = _find_zeros(weight) if num_experts is None else None
        if zeros is None:
            return low_bit.widen(weight)
        device = weight.codes.device
        codes = _pack(unpack_codes(weight.codes.cpu(), weight.bits)).to(device)
        scale = weight.scale.t().to(weight.dtype).contiguous()
        return Uint4Weight(codes, scale, _pack(zeros.cpu()).to(device), weight.order, weight.shape)

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if not isinstance(weight, Uint4Weight):
            return self._linear(x, weight, bias, dtype)
        assert isinstance(x, Tensor)
        columns = x if weight.order is None else x.index_select(1, weight.order)
        out = columns @ self._ops.convert_from_uint4(weight.codes, weight.scale, weight.zeros, x.dtype)
        return (out if bias is None else out + bias).to(dtype or x.dtype)


def _find_zeros(weight: LowBitWeight) -> Tensor | None:
    """The code that stands for 0 of each group, `[out, groups]`; None: the op cannot take the matrix."""
    is_known = weight.bits == 4 and weight.table is None and not weight.quantizes_inputs
    is_even = weight.shape[0] % _PER_WORD == 0 and weight.columns % weight.group_size == 0
    if not is_known or not is_even or (weight.order is not None and weight.order.dim() > 1):
        return None
    scale, center = weight.scale.float(), weight.center
    if weight.offset is None:
        return torch.full(scale.shape, center, dtype=torch.uint8)
    zeros = torch.where(scale == 0, 0, weight.offset / scale).round()
    are_whole = bool((zeros * scale == weight.offset).all())
    zeros += center
    return zeros.to(torch.uint8) if are_whole and bool(((zeros >= 0) & (zeros <= _MOST)).all()) else None


def _pack(codes: Tensor) -> Tensor:
    """uint8 `[out, columns]` -> int32 `[columns, out / 8]`."""
    words = codes.t().to(torch.int64).reshape(codes.shape[1], -1, _PER_WORD)
    return torch.bitwise_left_shift(words, torch.arange(0, 4 * _PER_WORD, 4)).sum(-1).to(torch.int32)
