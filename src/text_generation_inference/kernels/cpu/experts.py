"""Mixtures of experts over the native CPU kernels: each expert's matrices are packed on their own.

So only the experts that a token asks for are read, from float32 or from the quantised blocks of a GGUF file.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_inference.kernels import experts as reference
from text_generation_inference.kernels.cpu.ops import ACTIVATIONS, NativeOps, Packed
from text_generation_inference.kernels.matrices import BlockPieces, PackedWeight, Weight


class PackedExperts(PackedWeight):
    """The matrices of all experts."""

    __slots__ = ("_addresses", "address", "matrices", "shape")

    def __init__(self, matrices: list[Packed]) -> None:
        self.matrices = matrices
        self.shape = torch.Size((sum(matrix.out_features for matrix in matrices), matrices[0].in_features))
        self._addresses = (ctypes.c_void_p * len(matrices))(*(matrix.address for matrix in matrices))
        self.address = ctypes.addressof(self._addresses)


class NativeExperts:
    """Overrides for a device's `ops`, as `NativeOps` has them."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def pack_experts(self, weight: Tensor | BlockPieces, num_experts: int) -> Weight:
        if isinstance(weight, BlockPieces):
            split = _split(weight.pieces, num_experts)
            return PackedExperts([self._ops.pack_blocks(pieces, weight.shape[1]) for pieces in split])
        packed = [self._ops.pack_linear(matrix) for matrix in weight.chunk(num_experts)]
        matrices = [matrix for matrix in packed if isinstance(matrix, Packed)]
        return PackedExperts(matrices) if len(matrices) == num_experts else weight

    def experts(
        self,
        x: Tensor,  # [tokens, hidden]
        ids: Tensor,  # [tokens, k]
        weights: Tensor,  # [tokens, k] float32
        gate_up: Weight,
        down: Weight,
        gate: str = "silu",
        biases: tuple[Tensor, Tensor] | None = None,
        scale_inputs: bool = False,
    ) -> Tensor:
        """-> `[tokens, hidden]`: the weighted sum of what each token's experts make of it."""
        if not isinstance(gate_up, PackedExperts) or not isinstance(down, PackedExperts):
            return reference.experts(x, ids, weights, gate_up, down, gate, biases, scale_inputs)
        if x.dtype is not torch.float32 or x.stride(1) != 1:
            wide = x.float().contiguous()
            return self.experts(wide, ids, weights, gate_up, down, gate, biases, scale_inputs).to(x.dtype)
        ids, weights = ids.long().contiguous(), weights.float().contiguous()
        if gate not in ACTIVATIONS or biases is not None:
            return self._one_by_one(x, ids, weights, gate_up, down, gate, biases, scale_inputs)
        out = torch.empty(x.shape)
        if self._ops.library.tgi_experts(
            x.data_ptr(), x.shape[0], x.stride(0), ids.data_ptr(), weights.data_ptr(), ids.shape[1],
            len(gate_up.matrices), gate_up.address, down.address, ACTIVATIONS.index(gate), int(scale_inputs),
            out.data_ptr(), self._ops.num_threads,
        ):  # fmt: skip
            raise IndexError(f"an expert is not below {len(gate_up.matrices)}")
        return out

    def _one_by_one(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        gate: str,
        biases: tuple[Tensor, Tensor] | None,
        scale_inputs: bool,
    ) -> Tensor:
        """What the kernel does not know: other gates, biases."""
        found = torch.empty((*ids.shape, x.shape[1]))
        for number, matrix in enumerate(gate_up.matrices):
            tokens, places = torch.where(ids == number)
            if not len(tokens):
                continue
            rows = x[tokens] * weights[tokens, places, None] if scale_inputs else x[tokens]
            first, second = (None, None) if biases is None else (biases[0][number], biases[1][number])
            gated = reference.GATES[gate](*self._ops.linear(rows, matrix, first).chunk(2, -1))
            found[tokens, places] = self._ops.linear(gated, down.matrices[number], second)
        return found.sum(1) if scale_inputs else (found * weights[..., None]).sum(1)


def _split(pieces: Sequence[tuple[str, Tensor]], num_experts: int) -> list[list[tuple[str, Tensor]]]:
    """Rows of one matrix below the other -> those of each expert."""
    per_expert = sum(len(rows) for _, rows in pieces) // num_experts
    split: list[list[tuple[str, Tensor]]] = [[]]
    missing = per_expert
    for kind, rows in pieces:
        while len(rows):
            if not missing:
                split.append([])
                missing = per_expert
            split[-1].append((kind, rows[:missing]))
            taken, rows = min(missing, len(rows)), rows[missing:]
            missing -= taken
    return split
