"""Root-mean-square normalisation.

Level 4.
"""

from torch import Tensor

from tgi.devices.device import Ops
from tgi.weights.declare import Declared, Module, Part


class RMSNorm(Module):
    def __init__(self, ops: Ops, name: str, size: int, eps: float) -> None:
        self.ops = ops
        self.part = Part(f"{name}.weight", (size,))
        self.eps = eps
        self.weight: Tensor

    def declare(self) -> list[Declared]:
        return [Declared("weight", [self.part])]

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise: (normalised, new residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
