"""Root-mean-square normalisation."""

from torch import Tensor

from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Declared, Module, Part


class RMSNorm(Module):
    def __init__(self, ops: Ops, name: str, size: int, eps: float) -> None:
        self.ops = ops
        self.part = Part(f"{name}.weight", (size,))
        self.eps = eps
        self.weight: Tensor

    def declare(self) -> list[Declared]:
        return [Declared("weight", [self.part])]

    def forward(self, x: Tensor, quantize_for: InputForm = None) -> Rows:
        """`quantize_for`: the form that the matrix after it wants."""
        return self.ops.rms_norm(x, self.weight, self.eps, quantize_for=quantize_for)

    def add(self, x: Product, residual: Tensor, quantize_for: InputForm = None) -> tuple[Rows, Tensor]:
        """Add x to the residual stream and normalise: (normalised, new residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, quantize_for=quantize_for)
