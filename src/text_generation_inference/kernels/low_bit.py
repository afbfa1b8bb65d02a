"""Matrices in codes of 4 or 8 bits, and the ops on them in plain torch: the definition of the faster ones.

A value is `scale * (code - center) - offset`, or `scale * table[code] - offset` where there is a table. Scale and
offset are those of a group: some successive columns of one row. The center is 8 of 4 bits and 128 of 8, so that a
symmetric matrix has no offset; one with zero points has `scale * (zero - center)`, which is exact in float32 for scales
of 16 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

# Of matrices, for ops that do not take all of them. Offsets are scales times whole numbers in all but one kind.
KINDS = ("4 bits", "8 bits", "4 bits with offsets", "table")
INT8_MAX = 127
_SMALLEST_SCALE = 1e-12  # of a row of zeros
_ROWS_AT_A_TIME = 1024


@dataclass(slots=True)
class LowBitWeight:
    """`[out, in]`. Columns may come in another order than inputs do, and there may be more of them (`order`)."""

    codes: Tensor  # uint8 [out, columns * bits / 8]; of 4 bits the lower half of a byte is the even column
    scale: Tensor  # [out, groups] float32, float16 or bfloat16
    offset: Tensor | None  # [out, groups] float32
    bits: int  # 4 or 8
    group_size: int  # columns; the last group of a row may be shorter
    in_features: int
    dtype: torch.dtype = torch.float32  # of the values that the matrix stands for, and of its products
    table: Tensor | None = None  # [16] float32: the value of each code of 4 bits; then there is no center
    order: Tensor | None = None  # [columns], or [experts, columns], int32: the input of each column; None: as they come
    quantizes_inputs: bool = False  # rows are multiplied as integers of 8 bits (of a matrix of 8, with a scale per row)
    input_scale: Tensor | None = None  # [] float32 of those, the same for all inputs; None: found from each row
    keeps_wide: bool = False  # there is room for its values, too, where products of many rows are faster with them

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.in_features))

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def center(self) -> int:
        return 0 if self.table is not None else 1 << (self.bits - 1)

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scale, self.offset, self.order)
        return sum(each.nbytes for each in parts if each is not None)

    @property
    def form(self) -> tuple[object, ...]:
        """What kernels are compiled for: those of matrices of one shape and form are the same."""
        has = (self.offset is not None, self.input_scale is not None)
        table = None if self.table is None else tuple(float(value) for value in self.table.cpu())
        orders = 0 if self.order is None else self.order.dim()
        return (self.bits, self.group_size, self.columns, self.scale.dtype, self.quantizes_inputs, orders, table, *has)


def pack_low_bit(weight: LowBitWeight, num_experts: int | None = None) -> LowBitWeight:
    """Bring a weight into the form `linear` (or, of several experts, `experts`) wants. Called once after loading."""
    return weight


# -- codes -------------------------------------------------------------------------------------------------------------


def unpack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 `[rows, bytes]` -> uint8 `[rows, columns]`."""
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """The other way round. Of 4 bits there must be an even number of columns."""
    return codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4


# -- values ------------------------------------------------------------------------------------------------------------


def spread(groups: Tensor, group_size: int, columns: int) -> Tensor:
    """`[rows, groups]` -> `[rows, columns]`."""
    return groups.repeat_interleave(group_size, 1)[:, :columns]


def columns_of(weight: LowBitWeight) -> Tensor:
    """The values in the order of their columns, float32 `[out, columns]`."""
    codes = unpack_codes(weight.codes, weight.bits)
    wide = codes.float() - weight.center if weight.table is None else weight.table[codes.int()]
    wide = wide * spread(weight.scale.float(), weight.group_size, weight.columns)
    if weight.offset is not None:
        wide -= spread(weight.offset, weight.group_size, weight.columns)
    return wide


def dequantize(weight: LowBitWeight) -> Tensor:
    """-> float32 `[out, in]`."""
    wide = columns_of(weight)
    if weight.order is None:
        return wide
    order = weight.order.long().view(-1, weight.columns)
    of_each = wide.view(order.shape[0], -1, weight.columns)
    out = wide.new_zeros((*of_each.shape[:2], weight.in_features))
    out.index_add_(2, order[0], of_each) if len(order) == 1 else out.scatter_add_(
        2, order[:, None].expand(of_each.shape), of_each
    )
    return out.flatten(0, 1)


def widen(weight: LowBitWeight) -> Tensor:
    """-> `[out, in]` of the type it stands for, some rows at a time."""
    rows = weight.shape[0]
    if weight.order is not None and weight.order.dim() == 2:
        return dequantize(weight).to(weight.dtype)
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.codes.device)
    for first in range(0, rows, _ROWS_AT_A_TIME):
        out[first : first + _ROWS_AT_A_TIME] = dequantize(take_rows(weight, first, first + _ROWS_AT_A_TIME))
    return out


# -- products ----------------------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x `[tokens, in]` -> int8, and the scale of each row, float32 `[tokens]`: its largest value over 127."""
    wide = x.float()
    if input_scale is not None:
        scale = input_scale.expand(x.shape[0])
    else:
        scale = (wide.abs().amax(-1) / INT8_MAX).clamp(min=_SMALLEST_SCALE)
    return (wide / scale[:, None]).round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8), scale


def linear(x: Tensor, weight: LowBitWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """-> `[tokens, out]` of `dtype`. Values are rounded to x's type before the product."""
    if weight.quantizes_inputs:
        rows, scale = quantize_rows(x, weight.input_scale)
        out = F.linear(rows.float() * scale[:, None], dequantize(weight))
    else:
        out = F.linear(x, dequantize(weight).to(x.dtype))
    return (out if bias is None else out + bias.to(out.dtype)).to(dtype)


# -- making, joining and cutting ---------------------------------------------------------------------------------------


def quantize(
    weight: Tensor, bits: int, group_size: int, is_symmetric: bool = True, table: Tensor | None = None
) -> LowBitWeight:
    """weight `[out, in]` to the nearest codes, with the scales that its groups give."""
    rows, columns = weight.shape
    group_size = min(group_size, columns)
    count = -(-columns // group_size)
    wide = F.pad(weight.float(), (0, count * group_size - columns)).view(rows, count, group_size)
    offset = None
    if table is not None:
        scale = (wide.abs().amax(-1) / table.abs().max()).clamp(min=_SMALLEST_SCALE)
        values, places = table.sort()
        bounds = (values[1:] + values[:-1]) / 2
        codes = places[torch.bucketize(wide / scale[..., None], bounds)]
    else:
        center = 1 << (bits - 1)
        if is_symmetric:
            scale = (wide.abs().amax(-1) / (center - 1)).clamp(min=_SMALLEST_SCALE)
            zero = torch.full_like(scale, center)
        else:
            low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
            scale = ((high - low) / (2 * center - 1)).clamp(min=_SMALLEST_SCALE)
            zero = (-low / scale).round()
            offset = scale * (zero - center)
        codes = ((wide / scale[..., None]).round() + zero[..., None]).clamp(0, 2 * center - 1)
    codes = pack_codes(codes.to(torch.uint8).view(rows, -1)[:, :columns], bits)
    return LowBitWeight(codes, scale, offset, bits, group_size, columns, weight.dtype, table)


def take_rows(weight: LowBitWeight, start: int, end: int) -> LowBitWeight:
    """Rows from `start` to `end`, of a matrix whose rows share one order."""
    offset = None if weight.offset is None else weight.offset[start:end]
    return replace(weight, codes=weight.codes[start:end], scale=weight.scale[start:end], offset=offset)


def change_rows(weight: LowBitWeight, change: Callable[[Tensor], Tensor]) -> LowBitWeight:
    """With rows chosen, or in another order; `change` does so with whatever comes by row."""
    offset = None if weight.offset is None else change(weight.offset)
    return replace(weight, codes=change(weight.codes), scale=change(weight.scale), offset=offset)


def take_columns(weight: LowBitWeight, start: int, end: int) -> LowBitWeight:
    """Columns from `start` to `end` of a matrix without an order, perhaps in smaller groups or, if half bytes would
    have to be cut, in 8 bits."""
    assert weight.order is None
    if weight.bits == 4 and (start | end) % 2:
        weight = to_8_bits(weight)
    size = gcd(weight.group_size, start) if start else weight.group_size
    if end != weight.in_features:
        size = gcd(size, end)
    weight = regroup(weight, size)
    first, last = start // size, -(-end // size)
    bytes_per = weight.bits / 8
    return replace(
        weight,
        codes=weight.codes[:, int(start * bytes_per) : int(end * bytes_per)].contiguous(),
        scale=weight.scale[:, first:last].contiguous(),
        offset=None if weight.offset is None else weight.offset[:, first:last].contiguous(),
        in_features=end - start,
    )


def regroup(weight: LowBitWeight, group_size: int) -> LowBitWeight:
    """The same in smaller groups, whose size divides that of before."""
    times = weight.group_size // group_size
    if times == 1:
        return weight
    count = -(-weight.columns // group_size)

    def repeat(groups: Tensor) -> Tensor:
        return groups.repeat_interleave(times, 1)[:, :count].contiguous()

    offset = None if weight.offset is None else repeat(weight.offset)
    return replace(weight, scale=repeat(weight.scale), offset=offset, group_size=group_size)


def to_8_bits(weight: LowBitWeight) -> LowBitWeight:
    """The same values in codes of 8 bits, of a matrix without a table."""
    assert weight.table is None
    codes = unpack_codes(weight.codes, weight.bits) + (128 - weight.center)
    return replace(weight, codes=codes, bits=8)


def can_join(weights: Sequence[LowBitWeight], num_experts: int = 1) -> bool:
    """Whether they can be one matrix, one below the other: of as many bits, with one table and order of columns.

    Those of several experts may have an order for each.
    """
    first = weights[0]
    return all(
        weight.bits == first.bits
        and weight.quantizes_inputs == first.quantizes_inputs
        and _are_equal(weight.table, first.table)
        and weight.columns == some[0].columns
        and _are_equal(weight.order, some[0].order)
        for some in _by_expert(weights, num_experts)
        for weight in some
    )


def join(weights: Sequence[LowBitWeight], num_experts: int = 1) -> LowBitWeight:
    """One below the other; groups become those that fit into all, scales and offsets those that hold all."""
    if len(weights) == 1:
        return weights[0]
    if not can_join(weights):
        assert num_experts > 1
        each = [join(some) for some in _by_expert(weights, num_experts)]
        most = max(weight.columns for weight in each)
        orders, each = zip(*(_fill(weight, most) for weight in each), strict=True)
        return replace(join(each), order=torch.stack(orders))
    size = gcd(*(weight.group_size for weight in weights))
    weights = [regroup(weight, size) for weight in weights]
    scales = [weight.scale for weight in weights]
    if any(scale.dtype is not scales[0].dtype for scale in scales):
        scales = [scale.float() for scale in scales]
    offset = None
    if any(weight.offset is not None for weight in weights):
        offset = torch.cat([_offset_of(weight) for weight in weights])
    input_scales = [weight.input_scale for weight in weights if weight.input_scale is not None]
    return replace(
        weights[0],
        codes=torch.cat([weight.codes for weight in weights]),
        scale=torch.cat(scales),
        offset=offset,
        input_scale=torch.stack(input_scales).amax() if input_scales else None,
    )


def _by_expert(weights: Sequence[LowBitWeight], num_experts: int) -> list[Sequence[LowBitWeight]]:
    count = len(weights) // num_experts
    return [weights[first : first + count] for first in range(0, len(weights), count)]


def _fill(weight: LowBitWeight, columns: int) -> tuple[Tensor, LowBitWeight]:
    """Its order, and what it is without: with columns that are 0 up to so many."""
    order, more = weight.order, columns - weight.columns
    if order is None:
        order = torch.arange(weight.columns, dtype=torch.int32, device=weight.codes.device)
    if more == 0:
        return order, replace(weight, order=None)
    assert weight.table is None
    weight = regroup(weight, gcd(weight.group_size, weight.columns))
    groups = -(-columns // weight.group_size) - weight.scale.shape[1]
    codes = F.pad(unpack_codes(weight.codes, weight.bits), (0, more), value=weight.center)
    filled = replace(
        weight,
        codes=pack_codes(codes, weight.bits),
        scale=F.pad(weight.scale, (0, groups)),
        offset=None if weight.offset is None else F.pad(weight.offset, (0, groups)),
        order=None,
    )
    return torch.cat((order, order[-1:].expand(more))), filled


def _offset_of(weight: LowBitWeight) -> Tensor:
    return torch.zeros_like(weight.scale, dtype=torch.float32) if weight.offset is None else weight.offset


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
