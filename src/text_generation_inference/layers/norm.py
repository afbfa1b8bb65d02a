"""Root-mean-square normalisation."""

from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.kernels.fp8 import Fp8Rows, Fp8Weight, ScaledRows
from text_generation_inference.weights.declare import Declared, Module, Part


class RMSNorm(Module):
    def __init__(self, ops: Ops, name: str, size: int, eps: float) -> None:
        self.ops = ops
        self.part = Part(f"{name}.weight", (size,))
        self.eps = eps
        self.weight: Tensor

    def declare(self) -> list[Declared]:
        return [Declared("weight", [self.part])]

    def forward(self, x: Tensor, quantize_for: Fp8Weight | None = None) -> Tensor | Fp8Rows:
        """Quantised where the result goes into a matrix in FP8."""
        return self.ops.rms_norm(x, self.weight, self.eps, quantize_for=quantize_for)

    def add(
        self, x: Tensor | ScaledRows, residual: Tensor, quantize_for: Fp8Weight | None = None
    ) -> tuple[Tensor | Fp8Rows, Tensor]:
        """Add x to the residual stream and normalise: (normalised, new residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, quantize_for=quantize_for)
