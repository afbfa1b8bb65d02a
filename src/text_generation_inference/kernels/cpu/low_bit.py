"""Matrices in codes of 4 or 8 bits, packed for the native CPU kernels: which of their kinds, and in which layout.

Scales lie before the codes they are for, once for all groups of 32 columns that share them. Tables of few integers are
multiplied as integers, others as float32.
"""

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.kernels.cpu.experts import PackedExperts
from text_generation_inference.kernels.cpu.ops import Columns, NativeOps, Packed
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import Weight

_GROUP = 32
_TABLE_CENTER = 32  # integers of a table are from -32 to 31 ...
_TABLE_LARGEST = 16  # ... and no larger than this, so that sums over two groups fit


class _LowScales(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("scale", "offset", "table", "integers")),
        *((name, c_int64) for name in ("columns", "group_size", "groups")),
    )


class NativeLowBit:
    """Overrides for a device's `ops`, as `NativeOps` has them."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def pack_low_bit(self, weight: LowBitWeight, num_experts: int | None = None) -> Weight:
        if weight.codes.device.type != "cpu":
            return weight
        if num_experts is None:
            return self._pack(weight)
        return PackedExperts([self._pack(_expert(weight, number, num_experts)) for number in range(num_experts)])

    def _pack(self, weight: LowBitWeight) -> Packed:
        kind = _kind_of(weight)
        if kind is None:
            return self._pack_values(weight)
        scale = weight.scale.float()
        table = integers = None
        if weight.table is not None:
            factor, table = _as_integers(weight.table)
            scale = scale * factor
            integers = (table.round() + _TABLE_CENTER).clamp(0, 255).to(torch.uint8)
        offset = None if weight.offset is None else -weight.offset.float()
        held = [None if each is None else each.contiguous() for each in (scale, offset, table, integers)]
        scales = _LowScales(
            *(None if each is None else each.data_ptr() for each in held),
            weight.columns,
            weight.group_size,
            weight.scale.shape[1],
        )
        codes = weight.codes if weight.codes.stride(1) == 1 else weight.codes.contiguous()
        rows, inputs = weight.shape
        packed = Packed(kind, rows, inputs, self._ops.library, columns=_columns_of(weight))
        self._ops.library.tgi_pack(
            packed.address, codes.data_ptr(), codes.stride(0), ctypes.addressof(scales), self._ops.num_threads
        )
        return packed

    def _pack_values(self, weight: LowBitWeight) -> Packed:
        """Of groups of odd sizes, in float32."""
        columns = replace(_columns_of(weight), count=_whole_groups(weight.in_features), order=None)
        values = F.pad(low_bit.dequantize(weight), (0, columns.count - weight.in_features))
        return self._ops.pack_rows("float32", values, weight.in_features, columns=columns)


def _expert(weight: LowBitWeight, number: int, count: int) -> LowBitWeight:
    rows = weight.shape[0] // count
    taken = low_bit.take_rows(weight, number * rows, (number + 1) * rows)
    if weight.order is not None and weight.order.dim() == 2:
        taken.order = weight.order[number]
    return taken


def _kind_of(weight: LowBitWeight) -> str | None:
    """None: no kernel has groups like these."""
    whole = weight.group_size >= weight.columns or weight.group_size % _GROUP == 0
    if weight.table is None:
        return f"low{weight.bits}{'' if weight.offset is None else '_offset'}" if whole else None
    if weight.offset is not None:
        return None
    exact = _is_of_integers(weight.table)
    if whole:
        return "table4" if exact else "float4"
    return "table4_halves" if exact and weight.group_size == _GROUP // 2 else None


def _as_integers(table: Tensor) -> tuple[float, Tensor]:
    """A factor, a power of two, and the table over that: integers, where some power of two makes them so."""
    wide = table.float()
    for power in range(8):
        scaled = wide * 2.0**power
        if torch.equal(scaled, scaled.round()):
            return 2.0**-power, scaled.contiguous()
    return 1.0, wide.contiguous()


def _is_of_integers(table: Tensor) -> bool:
    values = _as_integers(table)[1]
    return torch.equal(values, values.round()) and float(values.abs().max()) <= _TABLE_LARGEST


def _columns_of(weight: LowBitWeight) -> Columns:
    count = _whole_groups(weight.columns)
    groups = count // _GROUP
    if weight.group_size >= weight.columns:
        shift = (groups - 1).bit_length()
    else:
        per_scale = max(1, weight.group_size // _GROUP)
        shift = (per_scale & -per_scale).bit_length() - 1
    order = None
    if weight.order is not None:
        order = F.pad(weight.order.view(-1).to(torch.int32), (0, count - weight.columns), value=-1).contiguous()
    input_scale = 0.0 if weight.input_scale is None else float(weight.input_scale)
    return Columns(count, shift, order, weight.quantizes_inputs, input_scale)


def _whole_groups(columns: int) -> int:
    return -(-columns // _GROUP) * _GROUP
