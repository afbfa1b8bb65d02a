# pyright: basic, reportMissingImports=false
"""All layers of a decoder for a single row: six kernels per layer, most of which only read a weight.

Used where one request decodes alone; with more rows, layers run one by one with the libraries' products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from text_generation_inference.kernels.batch import ForwardBatch
from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.stack import StackLayer
from text_generation_inference.kernels.triton import small
from text_generation_inference.kernels.triton.vector import vector_product
from text_generation_inference.kernels.triton.vector8 import VectorProduct8


@dataclass(frozen=True, slots=True)
class VectorStack:
    layers: list[StackLayer]
    norm: Tensor
    cos_sin: Tensor
    heads: int
    eps: float
    scale: float
    activation: str


def make_stack(
    layers: list[StackLayer],
    norm: Tensor,
    cos_sin: Tensor,
    heads: int,
    eps: float,
    scale: float,
    activation: str,
    eight_bit: bool = True,
) -> VectorStack | None:
    """None where a weight is of a kind that the products for one row do not take, or heads have norms of their own.

    `eight_bit`: whether the GPU has those types.
    """
    if any(layer.q_norm is not None or layer.k_norm is not None for layer in layers):
        return None
    matrices = [m for layer in layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    if activation not in ("silu", "gelu_tanh") or not all(_can_multiply(m, eight_bit) for m in matrices):
        return None
    return VectorStack(layers, norm, cos_sin, heads, eps, scale, activation)


def _can_multiply(weight: object, eight_bit: bool) -> bool:
    if isinstance(weight, Fp8Weight):
        return eight_bit and not weight.by_square and weight.input_bound is None
    return isinstance(weight, Tensor) and weight.dtype in (torch.bfloat16, torch.float16)


class RunStack:
    """The op `run_stack`; `attention` is the op of that name."""

    def __init__(self, attention: Callable[..., Any], num_processors: int) -> None:
        self._attention = attention
        self._product8 = VectorProduct8(num_processors)

    def __call__(self, x: Tensor, stack: VectorStack, batch: ForwardBatch) -> Tensor | None:
        """x `[1, hidden]`, the embedding of the row's token -> its normalised hidden state; None for other batches."""
        if x.shape[0] != 1 or batch.num_decode != 1 or batch.table_rows is None:
            return None
        hidden = x.clone()
        for layer in stack.layers:
            head_dim, kv_heads = layer.k_cache.shape[3], layer.k_cache.shape[2]
            fused = torch.empty((1, layer.qkv.shape[0]), dtype=x.dtype, device=x.device)
            self._product(hidden, layer.qkv, fused, layer.qkv_bias, norm=(layer.input_norm, stack.eps))
            q, k, v = fused.view(1, -1, head_dim).split((stack.heads, kv_heads, kv_heads), dim=1)
            q = small.rotary_and_cache(q, k, v, stack.cos_sin, batch, layer.k_cache, layer.v_cache, layer.kv_scales)
            mixed = self._attention(
                q, layer.k_cache, layer.v_cache, batch, stack.scale, layer.window, kv_scales=layer.kv_scales
            )
            self._product(mixed, layer.o, hidden, layer.o_bias, add=True)
            gated = torch.empty((1, layer.down.shape[1]), dtype=x.dtype, device=x.device)
            self._product(
                hidden, layer.gate_up, gated, layer.gate_up_bias,
                norm=(layer.post_norm, stack.eps), gate=stack.activation,
            )  # fmt: skip
            self._product(gated, layer.down, hidden, layer.down_bias, add=True)
        return small.rms_norm(hidden, stack.norm, stack.eps)

    def _product(self, x: Tensor, weight: Tensor | Fp8Weight, out: Tensor, bias: Tensor | None, **more: Any) -> None:
        if isinstance(weight, Fp8Weight):
            self._product8(x, weight, out, bias, **more)
        else:
            vector_product(x, weight, out, bias, **more)
