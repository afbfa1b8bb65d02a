"""Normalisation of the residual stream: by the root of the mean square, or with the mean subtracted."""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.partial_sum import PartialSum
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import PLAIN_TENSORS, Declared, Float32Tensors, Module, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    eps: float
    is_centred: bool = False  # LayerNorm: the mean is subtracted; else RMSNorm
    bias: bool = False  # of a centred one
    has_weight: bool = True
    keeps_float32: bool = False  # the weight stays in float32 and multiplies before the result is rounded
    plus: float = 0.0  # what is added to the stored weight; it stays in float32 then


class Norm(Module):
    @abstractmethod
    def forward(self, x: Tensor, quantize_for: InputForm = None) -> Rows:
        """`quantize_for`: the form that the matrix after it wants."""

    @abstractmethod
    def add(self, x: Product, residual: Tensor, quantize_for: InputForm = None) -> tuple[Rows, Tensor]:
        """Add x to the residual stream and normalise: (normalised, new residual)."""


class RMSNorm(Norm):
    def __init__(self, ops: Ops, part: Part, spec: NormSpec) -> None:
        self.ops = ops
        self.part = part
        self.eps = spec.eps
        wide = spec.keeps_float32 or spec.plus != 0
        self.storage = Float32Tensors(spec.plus) if wide else PLAIN_TENSORS
        self.weight: Tensor

    def declare(self) -> list[Declared]:
        return [Declared("weight", [self.part], self.storage)]

    def forward(self, x: Tensor, quantize_for: InputForm = None) -> Rows:
        return self.ops.rms_norm(x, self.weight, self.eps, quantize_for=quantize_for)

    def add(self, x: Product, residual: Tensor, quantize_for: InputForm = None) -> tuple[Rows, Tensor]:
        if isinstance(x, PartialSum):
            about = (residual, self.weight, self.eps, quantize_for)
            return x.ranks.all_reduce_add_rms_norm(self.ops, x.data, *about)
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, quantize_for=quantize_for)


class LayerNorm(Norm):
    def __init__(self, ops: Ops, part: Part, bias: Part | None, spec: NormSpec) -> None:
        self.ops = ops
        self.parts = {"weight": part} if spec.has_weight else {}
        if bias is not None and spec.bias:
            self.parts["bias"] = bias
        self.eps = spec.eps
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def declare(self) -> list[Declared]:
        return [Declared(attribute, [part]) for attribute, part in self.parts.items()]

    def forward(self, x: Tensor, quantize_for: InputForm = None) -> Rows:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, quantize_for=quantize_for)

    def add(self, x: Product, residual: Tensor, quantize_for: InputForm = None) -> tuple[Rows, Tensor]:
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, quantize_for=quantize_for)


def make_norm(ops: Ops, spec: NormSpec, name: str, size: int) -> Norm:
    weight, bias = Part(f"{name}.weight", (size,)), Part(f"{name}.bias", (size,))
    return LayerNorm(ops, weight, bias, spec) if spec.is_centred else RMSNorm(ops, weight, spec)
