"""A mixture of experts in plain torch: the definition that faster kernels are tested against.

The matrices of all experts lie one below the other in one matrix, in the model's type, in FP8 or in few bits, so
that whatever holds a matrix holds these. Shapes are static and nothing is read back, so the op may be captured; sums
are always taken in the same order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Weight, dequantize_rows, dequantize_weight, quantize_rows
from text_generation_inference.kernels.low_bit import LowBitWeight, dequantize
from text_generation_inference.kernels.low_bit import quantize_rows as quantize_to_int8
from text_generation_inference.kernels.matrices import BlockPieces, Weight, plain

_grouped_mm: Any = getattr(F, "grouped_mm", None)  # torch before 2.10 has none
_CLAMP, _SLOPE = 7.0, 1.702  # of GPT-OSS


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def _gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
    return (up + 1) * gate * torch.sigmoid(_SLOPE * gate)


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped,
}


def pack_experts(weight: Tensor | BlockPieces, num_experts: int) -> Weight:
    """Bring the matrices of all experts into the form `experts` wants. Called once after loading."""
    return weight


class Within(NamedTuple):
    """A row for each token and expert of it, in the order of experts."""

    order: Tensor  # [pairs]: which of `[tokens, k]` each is
    ends: Tensor  # [experts]: of each expert's rows
    rows: Tensor  # [pairs, hidden]: what goes in
    gated: Tensor  # [pairs, width]: what goes into the second product


def look_within(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    num_experts: int,
    gate: str,
    bias: Tensor | None,  # of the first product
    scale_inputs: bool,
) -> Within:
    """The first half of `experts`, with its arguments."""
    pairs = ids.reshape(-1)
    order = pairs.sort().indices  # of an expert's tokens any may come first; a stable sort runs on the host on Gaudi
    numbers = torch.arange(num_experts, device=x.device)
    ends = (pairs[:, None] == numbers).sum(0).cumsum(0)
    rows = x[order // ids.shape[1]]
    if scale_inputs:
        rows = (rows.float() * weights.reshape(-1)[order, None]).to(x.dtype)
    product = _multiply(rows, gate_up, ends)
    if bias is not None:
        product = product + bias[pairs[order]]
    return Within(order, ends, rows, GATES[gate](*product.chunk(2, -1)))


def experts(
    x: Tensor,  # [tokens, hidden]
    ids: Tensor,  # [tokens, k]: experts of each token
    weights: Tensor,  # [tokens, k] float32: how much of each
    gate_up: Weight,  # [experts * 2 * width, hidden]: of each expert gates, then values
    down: Weight,  # [experts * hidden, width]
    gate: str = "silu",  # a word of `GATES`
    biases: tuple[Tensor, Tensor] | None = None,  # [experts, 2 * width], [experts, hidden]
    scale_inputs: bool = False,  # the weights are multiplied with what goes into experts, not with what comes out
) -> Tensor:
    """-> `[tokens, hidden]`: the weighted sum of what each token's experts make of it."""
    tokens, hidden = x.shape
    count, top_k = down.shape[0] // hidden, ids.shape[1]
    within = look_within(x, ids, weights, gate_up, count, gate, None if biases is None else biases[0], scale_inputs)
    order = within.order
    product = _multiply(within.gated, down, within.ends)
    if biases is not None:
        product = product + biases[1][ids.reshape(-1)[order]]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    found = product[back].view(tokens, top_k, hidden).float()
    return (found.sum(1) if scale_inputs else (found * weights[..., None]).sum(1)).to(x.dtype)


def _multiply(rows: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """rows `[pairs, in]` in the order of their experts, `ends` `[experts]` of each expert's rows -> `[pairs, out]`."""
    if isinstance(weight, LowBitWeight):
        if weight.quantizes_inputs:
            data, scale = quantize_to_int8(rows, weight.input_scale)
            rows = (data.float() * scale[:, None]).to(rows.dtype)
        wide = dequantize(weight).to(rows.dtype)
        return _grouped(rows, wide.view(len(ends), -1, weight.shape[1]), ends)
    if not isinstance(weight, Fp8Weight):
        return _grouped(rows, plain(weight).view(len(ends), -1, weight.shape[1]), ends)
    if weight.input_bound is not None:
        rows = rows.clamp(-weight.input_bound, weight.input_bound)
    wide = dequantize_weight(weight).view(len(ends), -1, weight.shape[1])
    return _grouped(dequantize_rows(quantize_rows(rows, weight)), wide, ends).to(weight.dtype)


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows of each group times the transposed matrix of that group."""
    aligned = all(size * rows.dtype.itemsize % 16 == 0 for size in matrices.shape[1:])
    if _grouped_mm is not None and aligned and len(rows) and (rows.is_cpu or _groups_on_device(rows)):
        return _grouped_mm(rows, matrices.transpose(-2, -1), offs=ends.to(torch.int32))
    # Every expert multiplies all rows, and its own are kept.
    owners = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    out = rows.new_zeros((len(rows), matrices.shape[1]))
    for number, matrix in enumerate(matrices):
        out = torch.where((owners == number)[:, None], F.linear(rows, matrix), out)
    return out


def _groups_on_device(rows: Tensor) -> bool:
    """Whether torch's grouped product reads the ends of groups where they are; else it waits for them on the host."""
    if not rows.is_cuda or rows.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(rows.device) in ((9, 0), (10, 0))
